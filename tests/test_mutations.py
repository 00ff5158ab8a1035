"""Damage to every input: refused in words, or without any effect on a value or a statistic. Seeded, so it repeats.

What is written over here, a bit, a byte, a field, a whole header, is what a bad disk, a broken download, another
program or a careless hand would leave. Where a check value would hide what is behind it, it is made to fit again.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import xxhash
from conftest import ROOT, write_model

from zendelta import BdFile, Checkpoint, apply, compress, diff, inspect, validate
from zendelta.errors import InputError, UsageError

Damage = Callable[[bytearray, random.Random, int, int], None]


# --- kinds of damage ----------------------------------------------------------------------------------------------


def flip(data: bytearray, chance: random.Random, first: int, last: int) -> None:
    data[chance.randrange(first, last)] ^= 1 << chance.randrange(8)


def blot(data: bytearray, chance: random.Random, first: int, last: int) -> None:
    at = chance.randrange(first, last)
    data[at : at + 64] = bytes(len(data[at : at + 64])) if chance.random() < 0.5 else chance.randbytes(64)


def remove(data: bytearray, chance: random.Random, first: int, last: int) -> None:
    at = chance.randrange(first, last)
    del data[at : at + chance.randrange(1, 20)]


def repeat(data: bytearray, chance: random.Random, first: int, last: int) -> None:
    at = chance.randrange(first, last)
    data[at:at] = data[at : at + chance.randrange(1, 20)]


def cut(data: bytearray, chance: random.Random, first: int, last: int) -> None:
    del data[chance.randrange(first, last) :]


def extend(data: bytearray, chance: random.Random, first: int, last: int) -> None:
    data += chance.randbytes(chance.choice([1, 8, 99])) if chance.random() < 0.8 else bytes(8)


ALL = [flip, flip, flip, blot, remove, repeat, cut, extend]


def mutants(data: bytes, count: int, name: str, first: int = 0, last: int | None = None) -> Iterator[bytes]:
    """`count` damaged copies of some bytes, the damage beginning in [first, last) but for what is appended."""
    for number in range(count):
        chance = random.Random(f"{name} {number}")
        mutant = bytearray(data)
        chance.choice(ALL)(mutant, chance, first, len(data) if last is None else last)
        if mutant != data:
            yield bytes(mutant)


# --- a pair with every codec, and what the verbs say of it ----------------------------------------------------------


def normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@dataclass
class Made:
    """A pair, its .bd file's bytes, and what each verb makes of them."""

    folder: Path
    bd: bytes
    shown: dict[str, Any]
    checked: dict[str, Any]
    restored: dict[str, bytes]

    @property
    def header(self) -> int:
        """Where the header ends."""
        return 8 + int.from_bytes(self.bd[:8], "little")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def plain(report: Any) -> dict[str, Any]:
    """What a verb found, but for the names of the inputs."""
    found = report.to_json()
    return {key: value for key, value in found.items() if key not in ("path", "file", "base", "finetuned", "notes")}


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as name, mock.patch("os.fsync"):
        folder = Path(name)
        base = {
            "embed.weight": normal(20, 32, seed=1),
            "layers.0.experts.weight": normal(2, 32, 40, seed=2),
            "layers.0.norm.weight": normal(40, seed=3),
            "layers.0.same.weight": normal(16, 32, seed=4),
            "layers.0.count": torch.tensor(3),
            "dropped.weight": normal(8, 8, seed=5),
        }
        ft = {name: value + normal(*value.shape, seed=9, scale=0.01) for name, value in base.items() if value.dim()}
        del ft["dropped.weight"]
        ft["embed.weight"] = torch.cat([ft["embed.weight"], normal(3, 32, seed=6)])
        ft["layers.0.same.weight"] = base["layers.0.same.weight"]
        ft["layers.0.count"] = torch.tensor(4)
        ft["new.weight"], ft["twin.weight"] = normal(4, 9, seed=7), normal(4, 9, seed=7)
        write_model(folder / "base", base, config={"model_type": "x", "dtype": "bfloat16"}, shards=2)
        write_model(folder / "ft", ft, config={"model_type": "x", "dtype": "bfloat16"}, files={"README.md": "tuned"})
        compress(folder / "base", folder / "ft", folder / "a.bd", threads=1)
        codecs = {tensor.codec for tensor in inspect(folder / "a.bd").tensors}
        assert codecs == {"sign+new", "sign", "dense", "same", "new"}
        checked = validate(folder / "base", folder / "ft", folder / "a.bd", threads=1)
        assert checked.passed
        apply(folder / "base", folder / "a.bd", folder / "out", threads=1)
        restored = contents(folder / "out")
        yield Made(folder, (folder / "a.bd").read_bytes(), plain(inspect(folder / "a.bd")), plain(checked), restored)


REFUSED = "refused"


def outcome(work: Callable[[], Any]) -> Any:
    """Do it: the result, or "refused". Only the input's fault may be found, whatever stands in it."""
    try:
        return work()
    except InputError as error:
        assert error.message
        assert len(error.message) < 2500
        return REFUSED


def applied(base: Path, delta: Path) -> dict[str, bytes]:
    out = base.parent / "mutant-out"
    try:
        apply(base, delta, out, threads=1)
        return contents(out)
    finally:
        shutil.rmtree(out, ignore_errors=True)
        assert not list(out.parent.glob(".*")), "nothing is left behind"


def use(made: Made, base: Path, ft: Path, delta: Path) -> int:
    """Run the verbs on inputs of which one is damaged; each refuses or says what it said before. Counts refusals."""
    shown = outcome(lambda: plain(inspect(delta)))
    assert shown in (REFUSED, made.shown)
    restored = outcome(lambda: applied(base, delta))
    assert restored in (REFUSED, made.restored)
    checked = outcome(lambda: plain(validate(base, ft, delta, threads=1)))
    refused = checked == REFUSED or not checked["passed"]
    assert refused or checked == made.checked
    return refused + (restored == REFUSED)


# --- .bd files ----------------------------------------------------------------------------------------------------


def test_a_flipped_bit_at_any_byte_of_the_header_is_refused_or_changes_nothing(made: Made) -> None:
    delta, chance = made.folder / "bad.bd", random.Random(1)
    whole, refused, harmless = BdFile.open(made.folder / "a.bd"), 0, 0
    for at in range(made.header):
        data = bytearray(made.bd)
        data[at] ^= 1 << chance.randrange(8)
        delta.write_bytes(data)
        found = outcome(lambda: BdFile.open(delta))
        if found == REFUSED:
            refused += 1
            continue
        harmless += 1
        assert found.content == whole.content
        assert found.arrays == whole.arrays
    assert refused > 0.8 * made.header, (refused, harmless)  # the rest is the space that pads it


@pytest.mark.parametrize("part", ["length", "header", "arrays", "end"])
def test_a_damaged_bd_file_is_refused_or_restores_the_same(made: Made, part: str) -> None:
    size = len(made.bd)
    first, last = {
        "length": (0, 8),
        "header": (8, made.header),
        "arrays": (made.header, size),
        "end": (size - 9, size),
    }[part]
    delta, refused = made.folder / "bad.bd", 0
    for data in mutants(made.bd, 120, f"bd {part}", first, last):
        delta.write_bytes(data)
        refused += use(made, made.folder / "base", made.folder / "ft", delta)
    assert refused > 100


def test_a_bd_file_cut_anywhere_near_a_boundary_is_refused(made: Made) -> None:
    file, delta = BdFile.open(made.folder / "a.bd"), made.folder / "bad.bd"
    ends = {0, 8, made.header, *(info.offset for info in file.arrays.values())}
    for end in {end + step for end in ends for step in (-1, 0, 1) if 0 <= end + step < len(made.bd)}:
        delta.write_bytes(made.bd[:end])
        assert outcome(lambda: BdFile.open(delta)) == REFUSED


def test_every_bit_of_a_carried_file_counts(made: Made) -> None:
    delta, at = made.folder / "bad.bd", made.bd.index(b"tuned")
    for bit in range(5 * 8):
        data = bytearray(made.bd)
        data[at + bit // 8] ^= 1 << bit % 8
        delta.write_bytes(data)
        assert use(made, made.folder / "base", made.folder / "ft", delta) == 2


# --- shards, indexes, configs -------------------------------------------------------------------------------------


@pytest.fixture
def copied(made: Made) -> Iterator[Path]:
    """A copy of the base that may be damaged."""
    base = shutil.copytree(made.folder / "base", made.folder / "bad-base")
    yield base
    shutil.rmtree(base)


def work_on(base: Path, ft: Path, made: Made) -> None:
    """Let the other verbs loose on a damaged checkpoint, which may be a sound one of other content."""
    out = made.folder / "mutant.bd"
    for verb in (lambda: compress(base, ft, out, threads=1, force=True), lambda: diff(base, ft, threads=1)):
        if outcome(verb) != REFUSED and out.exists():
            BdFile.open(out)


@pytest.mark.parametrize("part", ["header", "values", "all"])
def test_a_damaged_shard_of_the_base_is_refused_or_restores_the_same(made: Made, copied: Path, part: str) -> None:
    refused = 0
    for shard in sorted(copied.glob("*.safetensors")):
        data = shard.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        first, last = {"header": (0, header), "values": (header, len(data)), "all": (0, len(data))}[part]
        for mutant in mutants(data, 60, f"{shard.name} {part}", first, last):
            shard.write_bytes(mutant)
            refused += use(made, copied, made.folder / "ft", made.folder / "a.bd")
            work_on(copied, made.folder / "ft", made)
            work_on(made.folder / "ft", copied, made)
        shard.write_bytes(data)
    assert refused > 100


def test_a_damaged_fine_tune_is_refused_or_fails_validation(made: Made) -> None:
    ft = shutil.copytree(made.folder / "ft", made.folder / "bad-ft")
    shard = ft / "model.safetensors"
    data, refused = shard.read_bytes(), 0
    for mutant in mutants(data, 120, "ft"):
        shard.write_bytes(mutant)
        refused += use(made, made.folder / "base", ft, made.folder / "a.bd")
    assert refused > 100
    shutil.rmtree(ft)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_damaged_json_file_of_a_checkpoint_is_refused_or_changes_no_weight(
    made: Made, copied: Path, name: str
) -> None:
    file = copied / name
    data = file.read_bytes()
    for mutant in mutants(data, 150, name):
        file.write_bytes(mutant)
        use(made, copied, made.folder / "ft", made.folder / "a.bd")
        work_on(copied, made.folder / "ft", made)


# --- fields of another type, behind a check value that fits ---------------------------------------------------------

DEEP: Any = 0
for _ in range(300):
    DEEP = [DEEP]

OTHERS: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**40, 2**63, 2**64, 10**400, 0.0, 1.0, 1.5, -1.0, 1e308, float("nan"),
    float("inf"), "", "x", "BF16", "F4", "same", "sign", "..", "é" * 300, "\ud800", "a\nb", [], [0], [1, 2], [-1],
    [2**40, 2**40], [2**62, 2**62, 0], [1.0, 2.0], [True], [None], ["x"], [[]], [1] * 70, [0] * 70, {}, {"x": 1},
    {"scale": "row"}, {"": None}, DEEP,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def written_over(value: Any) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Every JSON value that differs in one place: its path, what stands there now, and the whole."""
    for path in places(value):
        parent, key = path[:-1], path[-1]
        for other in OTHERS:
            if (type(other), other) == (type(at(value, path)), at(value, path)):
                continue
            mutant = copy.deepcopy(value)
            at(mutant, parent)[key] = other
            yield path, other, mutant
        mutant = copy.deepcopy(value)
        del at(mutant, parent)[key]
        yield path, "deleted", mutant
        if isinstance(at(value, path), dict):
            mutant = copy.deepcopy(value)
            at(mutant, path)["unknown"] = 1
            yield path, "unknown", mutant


def compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def sealed(fields: Any) -> str:
    """The text of a header with a check value that fits."""
    if not isinstance(fields, dict):
        return compact(fields)
    fields = {key: value for key, value in fields.items() if key != "check"}
    check = xxhash.xxh3_128_hexdigest(compact(fields).encode())
    return compact({**fields, "check": check})


def rebuilt(made: Made, text: str) -> bytes:
    """The .bd file with another text in its header."""
    outer = json.loads(made.bd[8 : made.header])
    outer["__metadata__"]["zendelta"] = text
    header = json.dumps(outer, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 64)
    return len(header).to_bytes(8, "little") + header + made.bd[made.header :]


def kind(value: Any) -> Any:
    return float if type(value) is int else type(value)


def may_stand(path: tuple[Any, ...], before: Any, now: Any) -> bool:
    """Whether a reader may take what was written over: the same type, at a place where it decides nothing."""
    if path[0] == "options" and len(path) > 1:
        return True
    if now == "deleted" and len(path) == 2 and path[0] in ("files", "aliases", "tensors"):
        return True  # only what has no array of its own: another file, and a sound one
    if "revision" in path and (now is None or type(now) is str):
        return True
    if "stats" in path and ((path[-1] == "stats" and now == {}) or (kind(now) is float and now is not True)):
        return True  # another number: validate compares it
    return kind(now) is kind(before) or (now == "deleted" and type(path[-1]) is int) or now == "unknown"


@pytest.mark.slow
def test_every_field_of_the_header_of_another_type_is_refused_though_the_check_value_fits(made: Made) -> None:
    fields = json.loads(json.loads(made.bd[8 : made.header])["__metadata__"]["zendelta"])
    del fields["check"]
    delta, count, accepted = made.folder / "bad.bd", 0, []
    for path, now, mutant in written_over(fields):
        delta.write_bytes(rebuilt(made, sealed(mutant)))
        count += 1
        if outcome(lambda: BdFile.open(delta)) != REFUSED:
            assert may_stand(path, at(fields, path), now), (path, now)
            accepted.append((path, now))
            outcome(lambda: plain(inspect(delta)))
            outcome(lambda: applied(made.folder / "base", delta))
            outcome(lambda: plain(validate(made.folder / "base", made.folder / "ft", delta, threads=1)))
    assert count > 5000
    assert len(accepted) < count / 5


@pytest.mark.slow
def test_every_field_of_a_safetensors_header_of_another_type_is_refused(made: Made, copied: Path) -> None:
    shard = min(copied.glob("*.safetensors"))
    data = shard.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    fields, count = json.loads(data[8:end]), 0
    for path, now, mutant in written_over(fields):
        header = json.dumps(mutant).encode()
        shard.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
        count += 1
        found = outcome(lambda: Checkpoint.open(copied))
        if path[0] != "__metadata__" and now != "unknown" and path[1:] != ("dtype",):
            assert found == REFUSED or now == at(fields, path), (path, now)
        elif found != REFUSED:
            use(made, copied, made.folder / "ft", made.folder / "a.bd")
    assert count > 500


def test_every_field_of_an_index_or_a_config_of_another_type_is_refused_or_without_effect(
    made: Made, copied: Path
) -> None:
    for name in ("model.safetensors.index.json", "config.json"):
        file = copied / name
        data = file.read_bytes()
        fields = json.loads(data)
        if name == "config.json":
            fields |= {"text_config": {"tie_word_embeddings": False}, "architectures": ["A"]}
            fields |= {"quantization_config": None, "tie_word_embeddings": True}
        for _, _, mutant in written_over(fields):
            file.write_bytes(json.dumps(mutant).encode())
            if outcome(lambda: Checkpoint.open(copied)) != REFUSED:
                work_on(copied, made.folder / "ft", made)
                work_on(made.folder / "ft", copied, made)
        file.write_bytes(data)


# --- headers that ask for the impossible, with little memory to try it in --------------------------------------------

HOSTILE = r"""
import json, os, resource, sys, time
from pathlib import Path
sys.set_int_max_str_digits(0)
from zendelta import InputError, apply, compress, inspect, validate, ZendeltaError
import zendelta.codec.kernels.cpu, safetensors, torch
folder = Path(sys.argv[1])
base, ft, good = folder / "base", folder / "ft", (folder / "a.bd").read_bytes()
end = 8 + int.from_bytes(good[:8], "little")
outer = json.loads(good[8:end])
inner = json.loads(outer["__metadata__"]["zendelta"])
sys.path.insert(0, sys.argv[2])
from test_mutations import sealed

def shard(header, size=None, body=b"", length=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    def write(path):
        path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + body)
        if size is not None:
            os.truncate(path, size)
    return write

def one(**entry):
    return {"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], **entry}}

def shaped(sizes):
    return b'{"w":{"dtype":"U8","shape":[' + sizes + b'],"data_offsets":[0,1]}}'

def text(inside):
    return shard({**outer, "__metadata__": {"zendelta": inside}}, body=good[end:])

def bd(edit, size=None):
    fields, arrays = json.loads(json.dumps(inner)), json.loads(json.dumps(outer))
    edit(fields, arrays)
    arrays["__metadata__"]["zendelta"] = fields if isinstance(fields, str) else sealed(fields)
    return shard(arrays, size, good[end:])

def big_side(fields, arrays):
    last = max(entry["data_offsets"][1] for name, entry in arrays.items() if name != "__metadata__")
    fields["files"]["big.json"] = {"fingerprint": "x", "from": "file"}
    arrays[":file:big.json"] = {"dtype": "U8", "shape": [10**11], "data_offsets": [last, last + 10**11]}

def same_of(shape, matrix):
    def edit(fields, arrays):
        fields["tensors"]["layers.0.same.weight"].update(shape=shape, matrix=matrix)
    return edit

def wide_matrix(fields, arrays):
    entry = fields["tensors"]["layers.0.experts.weight"]
    entry["shape"], entry["matrix"] = [2**40, 2**40], [1, 2**40, 2**40]
    entry["terms"][0]["rows"] = [0, 2**40]

deep = b"[" * 200000
many = b'{"k":1' + b"".join(b',"k%d":1' % n for n in range(100000)) + b',"k":1}'
huge = b"9" * 4000
files = {
    "length 2**63-1.safetensors": shard(one(), length=2**63 - 1),
    "length 2**64-1.safetensors": shard(one(), length=2**64 - 1),
    "length 100000001.safetensors": shard(one(), length=100_000_001, size=2 * 10**8),
    "length 99999999, short.safetensors": shard(one(), length=99_999_999),
    "length 99999999, zeros.safetensors": shard(one(), length=99_999_999, size=2 * 10**8),
    "shape 2**40.safetensors": shard(one(shape=[2**40, 2**40], data_offsets=[0, 2**80])),
    "shape 2**40, sparse.safetensors": shard(one(shape=[2**40], data_offsets=[0, 2**40 + 1]), size=2**40 + 100),
    "shape negative.safetensors": shard(one(shape=[-1, -1])),
    "shape float.safetensors": shard(one(shape=[1.0])),
    "shape infinite.safetensors": shard(shaped(b"1e999"), body=b"x"),
    "shape NaN.safetensors": shard(shaped(b"NaN"), body=b"x"),
    "shape huge.safetensors": shard(shaped(b",".join([huge] * 500))),
    "shape too many digits.safetensors": shard(shaped(huge * 20)),
    "shape long.safetensors": shard(one(shape=[1] * 10**6), body=b"x"),
    "offsets huge.safetensors": shard(b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[%s,%s]}}' % (huge, huge)),
    "offsets negative.safetensors": shard(one(data_offsets=[-1, 0]), body=b"x"),
    "deep.safetensors": shard(b'{"w":' + deep),
    "deep objects.safetensors": shard(b'{"w":' * 100000),
    "twice.safetensors": shard(b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * 2 + b'"x":1}'),
    "twice, at the end of many.safetensors": shard(many),
    "not UTF-8.safetensors": shard(b'{"\xff":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "UTF-16.safetensors": shard(b"{\0" + json.dumps(one(shape=[0], data_offsets=[0, 0])).encode("utf-16-le")[2:]),
    "half a character.safetensors": shard(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "side file.bd": bd(big_side, 10**11 + len(good)),
    "matrix 2**40.bd": bd(wide_matrix),
    "same 2**40.bd": bd(same_of([2**40, 2**40], [1, 2**40, 2**40])),
    "same 2**20.bd": bd(same_of([2**20, 2**20], [1, 2**20, 2**20])),
    "same empty.bd": bd(same_of([2**62, 2**62, 0], [1, 2**62, 0])),
    "metadata number.bd": text(5),
    "text deep.bd": text(deep.decode()),
    "text many.bd": text(many.decode()),
    "text huge number.bd": text('{"format":%s}' % (huge * 20).decode()),
    "index.json": lambda path: None,
    "config.json": lambda path: None,
}
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 1_000_000_000,) * 2)
sys.set_int_max_str_digits(4300)
for name, write in files.items():
    path = folder / "hostile" / name
    path.parent.mkdir(exist_ok=True)
    write(path)
    delta = path if name.endswith(".bd") else folder / "a.bd"
    other = path if name.endswith(".safetensors") else base
    if name.endswith(".json"):
        other = folder / "hostile" / "base"
        os.system(f"cp -r '{base}' '{other}'")
        os.truncate(other / {"index.json": "model.safetensors.index.json"}.get(name, name), 10**11)
    start = time.monotonic()
    verbs = {
        "apply": lambda: apply(other, delta, folder / "hostile/out", threads=1),
        "validate": lambda: validate(other, ft, delta, threads=1),
    }
    if name.endswith(".bd"):
        verbs["inspect"] = lambda: inspect(delta).to_json()
    else:
        verbs["compress"] = lambda: compress(other, ft, folder / "hostile/x.bd", threads=1)
    for verb, call in verbs.items():
        if (verb, name) in (("inspect", "same 2**20.bd"), ("apply", "config.json")):
            call() if verb == "inspect" else None
            continue
        try:
            call()
        except InputError as error:
            if len(error.message) > 2500:
                sys.exit(f"{name}: {verb}: a message of {len(error.message)} characters")
        else:
            sys.exit(f"{name}: {verb} took it")
    took = time.monotonic() - start
    if took > 20:
        sys.exit(f"{name}: {took} s")
    os.system(f"rm -rf '{folder / 'hostile'}'")
print(len(files))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit on memory is Linux's")
def test_headers_that_ask_for_the_impossible_are_refused_at_once_and_in_little_memory(made: Made) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, made.folder, ROOT / "tests"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are Unix's")
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pipe_in_place_of_weights_is_refused_and_not_waited_for(tmp_path: Path, made: Made, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((InputError, UsageError)):
        diff(tmp_path, made.folder / "ft")


def test_a_shard_with_a_name_that_no_file_can_have_is_missing(made: Made, copied: Path) -> None:
    for name in ("x" * 300 + ".safetensors", "a\0b.safetensors", "", " "):
        file = copied / "model.safetensors.index.json"
        file.write_text(json.dumps({"weight_map": {"embed.weight": name}}))
        assert outcome(lambda: Checkpoint.open(copied)) == REFUSED
