"""`embert embed --file` from the outside: formats in, formats out, and what is refused."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from embert.server.bulk.run import DeviceConfig
from embert.server.cli.main import main
from tests.server.bulk.running import COMMAND, embed, embedded
from tests.server.live import ROOT, STAND_IN, environment, run_cli
from tests.server.models import NAN_WORD, build_classifier, three_heads

ROWS = [{"id": n, "text": f"text {n}", "tags": ["x"] * (n % 3), "meta": {"a": n}} for n in range(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same texts in every format, and their vectors in whole.npy."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "a.txt").write_text("".join(f"{row['text']}\n" for row in ROWS))
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "a.csv").write_text("id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in ROWS))
    (folder / "a.tsv").write_text("id\ttext\n" + "".join(f"{row['id']}\t{row['text']}\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=70)
    for part in range(2):
        with (folder / f"half-{part}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in ROWS[150 * part : 150 * (part + 1)])
    embed("--dimensions", "8", "-f", folder / "a.txt", "-o", folder / "whole.npy")
    return folder


def into(source: Path | str, target: Path, *options: str) -> str:
    return embed("--dimensions", "8", "-f", source, "-o", target, *options)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "half-*.jsonl"])
def test_every_input_gives_the_same_vectors(folder: Path, tmp_path: Path, name: str) -> None:
    """JSON lines and Parquet: with their columns, below."""
    into(f"{folder}/{name}", tmp_path / "vectors.npy")
    assert (tmp_path / "vectors.npy").read_bytes() == (folder / "whole.npy").read_bytes()


@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("a.jsonl", ("--keep-all",), ["id", "text", "tags", "meta"]),
        ("a.parquet", ("--keep", "id", "meta"), ["id", "meta"]),
    ],
)
def test_kept_columns(folder: Path, tmp_path: Path, name: str, options: tuple[str, ...], kept: list[str]) -> None:
    expected = [{key: row[key] for key in kept} for row in ROWS]
    into(folder / name, tmp_path / "vectors.parquet", *options)
    table = pyarrow.parquet.read_table(tmp_path / "vectors.parquet")
    assert table.schema.names == [*kept, "embedding"]
    assert table.drop(["embedding"]).to_pylist() == expected
    type_ = table.schema.field("embedding").type
    assert (type_.list_size, type_.value_type) == (8, pyarrow.float32())
    vectors = np.load(folder / "whole.npy")
    assert np.array_equal(table["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, 8), vectors)
    into(folder / name, tmp_path / "vectors.jsonl", *options)
    lines = [json.loads(line) for line in (tmp_path / "vectors.jsonl").read_text().splitlines()]
    assert np.array_equal(np.array([line.pop("embedding") for line in lines], np.float32), vectors)
    assert lines == expected


def test_sparse_and_multi_vectors(folder: Path, tmp_path: Path) -> None:
    model = three_heads(tmp_path / "model")
    source = folder / "a.jsonl"
    for option, names in (("--sparse", ["indices", "values"]), ("--multi", ["vectors"])):
        out = embed("-m", model, option, "-f", source).splitlines()
        embed("-m", model, option, "-f", source, "-o", tmp_path / "vectors.parquet", "--overwrite")
        table = pyarrow.parquet.read_table(tmp_path / "vectors.parquet")
        assert table.schema.names == ["text", *names]
        if option == "--multi":  # a matrix for each text
            assert table.schema.field("vectors").type.value_type.list_size == 24
        rows = table.to_pylist()
        assert len(rows) == len(out) == 300
        for row, line in zip(rows[::50], map(json.loads, out[::50]), strict=True):
            assert row["text"] == line["text"]
            for name in names:
                assert np.array_equal(np.array(row[name], np.float32), np.array(line[name], np.float32))


@pytest.mark.parametrize("option", ["fail", "skip"])
def test_rows_without_a_text(tmp_path: Path, option: str) -> None:
    rows: list[Any] = [{"text": f"text {n}", "id": n} for n in range(300)]
    rows[10] = {"id": 10}
    rows[280] = {"text": None, "id": 280}
    source, target = tmp_path / "a.jsonl", tmp_path / "vectors.parquet"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = embedded("-f", source, "-o", target, "--keep", "id", "--on-error", option)
    first = f"{source} line 11 has no field 'text'; it has id; --column names another"
    if option == "fail":
        assert (ended.returncode, ended.stderr) == (1, f"embert: error: {first}\n")
        assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
        return
    assert (ended.returncode, ended.stderr) == (0, f"embert: {first}; such rows are skipped\nembert: rows skipped: 2\n")
    found = pyarrow.parquet.read_table(target)["id"].to_pylist()
    assert found == [n for n in range(300) if n not in (10, 280)]


def test_texts_that_cannot_be_tokenized_are_named_or_skipped(tmp_path: Path) -> None:
    source, target = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    rows = [{"text": text, "id": number} for number, text in enumerate(["a", "word " * 300, "b", None])]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("-f", source, "-o", target, "--keep", "id", "--no-truncate")
    ended = embedded(*options)
    assert (ended.returncode, target.exists()) == (1, False)
    assert f"{source} line 2 has " in ended.stderr
    ended = embedded(*options, "--on-error", "skip")
    assert ended.returncode == 0
    assert "rows skipped: 2" in ended.stderr
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == [0, 2]


@pytest.mark.parametrize("name", ["out/", "out.jsonl"])
def test_a_run_does_not_read_what_it_writes(tmp_path: Path, name: str) -> None:
    """The output of the first run matches the glob of the second."""
    for part in range(2):
        (tmp_path / f"{part}.jsonl").write_text("".join(f'{{"text": "{part}.{n}"}}\n' for n in range(6)))
    run = ("-f", f"{tmp_path}/**/*.jsonl", "-o", f"{tmp_path}/{name}", "--dimensions", "2")
    options = ("--output-format", "jsonl", "--shard-texts", "4") if name == "out/" else ()
    embed(*run, *options)
    again = embedded(*run, *options, "--resume" if options else "--overwrite")
    assert again.returncode == 0, again.stderr
    lines = "".join(path.read_text() for path in sorted(tmp_path.rglob("out*/part-*" if options else name)))
    assert [json.loads(line)["text"] for line in lines.splitlines()] == [f"{p}.{n}" for p in range(2) for n in range(6)]


def test_a_vector_that_is_not_finite_ends_the_run_and_is_named(tmp_path: Path) -> None:
    model, rows = build_classifier(tmp_path / "model", "score"), tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a longer text"}\n\n{"text": "' + NAN_WORD + '"}\n{"text": "b"}\n')
    options = ("-m", model, "--pooling", "mean", "--device", "cpu", "-f", rows, "-o", tmp_path / "out.npy")
    ended = run_cli("embed", "-q", *map(str, options))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"{rows} line 3: " in ended.stderr
    assert "not finite" in ended.stderr
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("-f", "a.txt", "--column", "body"), 2, "--column goes with JSON lines, CSV and Parquet"),
        (("-f", "a.jsonl", "--keep", "id", "--keep-all"), 2, "--keep and --keep-all exclude each other"),
        (("-f", "a.jsonl", "-o", "x/", "--shard-texts", "0"), 2, "--shard-texts must be at least 1; it is 0"),
        (("-f", "a.txt", "--tokenization-workers", "-1"), 2, "--tokenization-workers must be at least 0; it is -1"),
        (("-f", "a.jsonl", "-o", "x.npy", "--on-error", "skip"), 2, "--on-error skip goes with JSON lines and Parquet"),
        (("-f", "a.jsonl", "--output-format", "parquet"), 1, "standard output takes JSON lines only, and parquet"),
        (("-f", "a.jsonl", "-o", "a.jsonl"), 1, "a.jsonl is part of the output"),
        (("-f", "a.jsonl", "-o", "x.parquet", "--keep", "nix"), 1, "no field 'nix' in the first 300 lines; --keep"),
        (("-f", "a.jsonl", "--column", "body"), 1, "a.jsonl line 1 has no field 'body'; it has id, text, tags, meta"),
        (("-f", "a.txt", "--input-format", "parquet"), 1, "a.txt cannot be read: "),
        (("-f", "a.txt", "-o", "other/"), 1, "other is not empty, and has no _manifest.json of an earlier run"),
        (("-f", "a.txt", "-o", "a.csv/"), 1, "error: a.csv: file exists"),
        (("-f", "a.txt", "-o", "/proc/self/"), 1, "error: "),
        (("text", "-o", "other"), 1, "other is a folder, which takes the texts of --file only"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    arguments: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(folder)
    Path("other").mkdir(exist_ok=True)
    Path("other/file").touch()
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(("embed", "-q", *arguments, *STAND_IN))
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (status, "")
    assert said in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl"])
def test_a_vector_must_have_a_name_of_its_own(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "embedding": [1]}\n')
    ended = embedded("-f", tmp_path / "a.jsonl", "-o", tmp_path / name, "--keep-all")
    assert ended.returncode == 1
    assert "'embedding'" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("name", ["vectors.npy", "shards/"])
def test_a_disk_that_is_full(tmp_path: Path, name: str) -> None:
    """Or a file that must not grow: the run fails with one sentence, and goes on once there is room."""
    source, target = tmp_path / "texts", f"{tmp_path}/{name}"
    source.write_text("".join(f"text {number}\n" for number in range(1_250)))
    command = [*COMMAND, "-f", str(source), "-o", target]

    def bounded() -> None:  # the output has 1.9 MB; a slot, which is a file too, 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))

    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, preexec_fn=bounded
    )
    assert ended.returncode == 1
    *complete, error = ended.stderr.splitlines()
    assert error.endswith("cannot be written: File too large")
    assert [line.endswith("texts are complete; --resume goes on after them") for line in complete] == [True]
    embed("-f", source, "-o", target, "--resume")
    embed("-f", source, "-o", f"{tmp_path}/whole-{name}")
    for path in [Path(target)] if Path(target).is_file() else Path(target).glob("part-*"):
        assert path.read_bytes() == Path(str(path).replace(f"{tmp_path}/", f"{tmp_path}/whole-")).read_bytes()


def test_a_folder_of_another_run_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    into(folder / "a.parquet", tmp_path / "out", "--shard-texts", "120")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def refused(*options: str) -> str:
        ended = embedded("--dimensions", "8", "-f", folder / "a.parquet", "-o", tmp_path / "out", *options)
        assert ended.returncode == 1
        return ended.stderr

    again = f"remove {tmp_path / 'out'}"
    assert "holds the shards of another run; add --resume to continue it" in refused()
    assert f"--shard-texts was 120 in {tmp_path}/out, and is 100; {again}" in refused(
        "--resume", "--shard-texts", "100"
    )
    other = folder / "other.parquet"
    changed = [row | {"text": "other"} if row["id"] == 60 else row for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(changed), other, row_group_size=70)
    ended = embedded("--dimensions", "8", "-f", other, "-o", tmp_path / "out", "--resume", "--shard-texts", "120")
    assert "cannot resume: the first 300 rows of" in ended.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    shard = tmp_path / "out" / "part-000001.parquet"
    shard.write_bytes(b"short")
    assert f"cannot resume: {shard} is missing or has changed" in refused("--resume", "--shard-texts", "120")


def test_tokenization_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, names, kinds, expected in (
        (16, ["auto"], ["cuda"], 12),
        (16, ["cuda:0", "cuda:1"], ["cuda", "cuda"], 13),
        (2, ["cuda:0"], ["cuda"], 1),
        (64, ["auto"], ["cpu"], 8),
    ):
        monkeypatch.setattr("embert.server.bulk.run.usable_cpus", lambda cpus=cpus: cpus)
        assert DeviceConfig(names=names).num_tokenization_processes(kinds) == expected
        assert DeviceConfig(names=names, tokenization_processes=3).num_tokenization_processes(kinds) == 3


def test_without_pyarrow_the_command_that_installs_it_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ModuleNotFoundError('no pyarrow', name='pyarrow')\n")
    hidden = environment()
    hidden["PYTHONPATH"] = f"{tmp_path}:{hidden['PYTHONPATH']}"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *arguments], cwd=ROOT, env=hidden, capture_output=True, text=True, check=False)

    for arguments, what in (
        (("-f", f"{folder}/a.parquet"), "parquet"),
        (("-f", f"{folder}/a.txt", "-o", f"{tmp_path}/vectors.parquet"), "Parquet"),
    ):
        ended = run(*arguments)
        assert (ended.returncode, ended.stderr) == (
            1,
            f"embert: error: {what} needs pyarrow: pip install 'embert[bulk]'\n",
        )
    ended = run("-f", f"{folder}/a.jsonl", "-o", f"{tmp_path}/vectors.npy")
    assert (ended.returncode, ended.stderr) == (0, "")
