"""Outputs: nothing partial under a final name, whatever happens; nothing replaced unasked."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

from signed_align import apply, atomic, filesystem, merge, port
from signed_align.cli import main
from signed_align.errors import OutputError, SignedAlignError, SourceError
from signed_align.files import atomic_path, require_free
from tests import tiny
from tests.steps import (
    RECORD,
    SYSTEMS,
    exchanges,
    limit,
    outcome,
    read,
    started,
    workplaces,
    write,
)


@contextmanager
def forked(work):
    """Do something in a copy of this process, which is gone afterwards."""
    child = started(work)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ---- kill -9 -------------------------------------------------------------------------------------


LIMITS = [SYSTEMS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SYSTEMS[1:])]


@pytest.fixture(params=LIMITS)
def system(request, monkeypatch):
    """A file system that can do everything, and others that cannot."""
    limit(request.param, monkeypatch.setattr)


def printed(module, *arguments):
    """The JSON that a module prints at its end, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.{module}", *arguments],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("limits", LIMITS)
def test_killed_at_every_step_a_run_leaves_the_old_output_or_the_new(limits):
    steps = printed("steps", limits)
    assert len(steps) == 8
    assert min(steps.values()) > 10


def test_between_exchange_and_exchange_nothing_is_missing(tmp_path):
    """Where the system can exchange, a directory that is replaced is there at every instant."""
    if not exchanges(tmp_path):
        pytest.skip("this file system cannot exchange directories")
    out = tmp_path / "out"
    write(out, "old", directory=True)
    seen = set()
    with forked(lambda: [write(out, "old", directory=True, force=True) for _ in range(200)]):
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            seen.add(out.is_dir())
    assert seen == {True}


def kills(count):
    found = printed("interrupted", "--kills", str(count))
    print(json.dumps(found))
    assert found.pop("left behind") == []
    assert sum(one["kills"] for one in found.values()) == count
    return sum(one.get("while writing", 0) for one in found.values())


def test_kills_at_random_instants():
    assert kills(20) > 3


@pytest.mark.slow
def test_two_hundred_kills_at_random_instants():
    assert kills(200) > 50


# ---- leftovers -----------------------------------------------------------------------------------


def test_what_a_dead_run_left_is_cleared_and_a_live_run_is_left_alone(tmp_path):
    out, ready = tmp_path / "out", tmp_path / "ready"

    def hang():
        with atomic_path(out, directory=True) as draft:
            (draft / "one").write_text("half")
            ready.touch()
            time.sleep(60)

    with forked(hang):
        while not ready.exists():
            time.sleep(0.001)
        write(out, "new", directory=True)
        assert len(workplaces(tmp_path)) == 1
    assert len(workplaces(tmp_path)) == 1
    with pytest.raises(OutputError, match="exists already"):
        require_free(out, directory=True)
    assert workplaces(tmp_path) == []
    assert read(out) == ("new", "new")


def test_a_program_that_a_run_started_does_not_keep_its_workplace(tmp_path):
    out, started = tmp_path / "out", tmp_path / "started"

    def start():
        with atomic_path(out, directory=False):
            child = subprocess.Popen(["sleep", "60"])
            started.write_text(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)

    assert outcome(start) == -signal.SIGKILL
    try:
        assert len(workplaces(tmp_path)) == 1
        write(out, "new")
        assert workplaces(tmp_path) == []
    finally:
        os.kill(int(started.read_text()), signal.SIGKILL)


def test_what_only_looks_like_a_workplace_stays(tmp_path):
    for name in (".out.partial-abcdefgh", ".out.partial-other", ".else.partial-abcdefgh"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("x")
    (tmp_path / ".out.partial-abcdefgh" / atomic.LOCK).touch()
    (tmp_path / ".out.partial-01234567").symlink_to(tmp_path / ".else.partial-abcdefgh")
    before = sorted(tmp_path.rglob("*"))
    write(tmp_path / "out", "new")
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "out"])


def test_without_locks_nothing_of_another_run_is_removed(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(filesystem.fcntl, "flock", refuse)
    with atomic_path(tmp_path / "out", directory=True) as draft:
        (draft / "one").write_text("mine")
        write(tmp_path / "out", "new", directory=True)
        assert (draft / "one").read_text() == "mine"
        shutil.rmtree(tmp_path / "out")
    assert (tmp_path / "out" / "one").read_text() == "mine"
    assert workplaces(tmp_path) == []


# ---- several runs into one place -----------------------------------------------------------------


@pytest.mark.parametrize("directory", [False, True])
@pytest.mark.parametrize("force", [False, True])
def test_of_several_runs_into_one_place_one_wins(tmp_path, system, directory, force):
    out, gate = tmp_path / "out", tmp_path / "gate"
    if force:
        write(out, "old", directory=directory, record="of old")

    def compete(name):
        while not gate.exists():
            time.sleep(0.001)
        try:
            write(out, name, directory=directory, force=force, record=f"of {name}")
        except OutputError as error:
            sentence = str(error)
            assert "\n" not in sentence
            assert any(said in sentence for said in ("appeared while", "exists already"))
            os._exit(2)

    for _ in range(3):
        children = []
        for name in "abcd":
            child = os.fork()
            if not child:
                code = 1
                try:
                    compete(name)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        gate.touch()
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        gate.unlink()
        assert sorted(codes) == ([0] * 4 if force else [0, 2, 2, 2])
        found = read(out)
        winners = [name for name, code in zip("abcd", codes, strict=True) if code == 0]
        complete = {name: (name, name) if directory else (name, f"of {name}") for name in winners}
        assert found in complete.values()
        assert workplaces(tmp_path) == []
        if not force:
            shutil.rmtree(out) if directory else out.unlink()


@pytest.mark.parametrize("directory", [False, True])
def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path, system, directory):
    out = tmp_path / "out"

    def overtaken():
        with atomic_path(out, directory=directory) as draft:
            write(out, "first", directory=directory, record="of first")
            if not directory:
                draft.write_text("second")
                draft.with_name("out" + RECORD).write_text("of second")

    with pytest.raises(OutputError, match="appeared while this run was writing"):
        overtaken()
    assert read(out) == (("first", "first") if directory else ("first", "of first"))
    assert workplaces(tmp_path) == []


# ---- companions ----------------------------------------------------------------------------------


def test_a_record_stands_beside_the_output_that_it_was_written_with(tmp_path):
    out, record = tmp_path / "out", tmp_path / f"out{RECORD}"
    record.write_text("of an output that is gone")
    write(out, "one", record="of one")
    assert read(out) == ("one", "of one")
    write(out, "two", force=True)
    assert read(out) == ("two", None)
    write(out, "three", force=True, record="of three")
    with pytest.raises(ZeroDivisionError), atomic_path(out, directory=False, force=True) as draft:
        raise ZeroDivisionError(draft.with_name(record.name).write_text("of none"))
    assert read(out) == ("three", "of three")
    with pytest.raises(OutputError), atomic_path(out, directory=False, force=True) as draft:
        draft.with_name(record.name).write_text("of none")  # and no output
    assert read(out) == ("three", "of three")
    assert sorted(tmp_path.iterdir()) == [out, record]


# ---- disks and names -----------------------------------------------------------------------------


@contextmanager
def disk(place, size):
    """A small disk of its own, and a function that makes it read-only."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield lambda mode: subprocess.run(
            ["mount", "-o", f"remount,{mode}", str(place)], check=True
        )
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Models of about 300 kB, a gauge between them, an artifact, a recipe."""
    from signed_align import scramble

    root = tmp_path_factory.mktemp("work")
    source = tiny.save(
        tiny.build("qwen2", tie_word_embeddings=False), root / "source", shard="80KB"
    )
    scramble(source, root / "twin", seed=3).save(root / "gauge.safetensors")
    torch.manual_seed(0)
    vectors = {f"blocks.{layer}.hook_resid_post": torch.randn(600, 48) for layer in range(2)}
    torch.save(vectors, root / "vectors.pt")
    (root / "vectors").mkdir()
    for name in "ab":
        torch.save(vectors, root / "vectors" / f"{name}.pt")
    weight = {"weight": 0.5}
    guided = {**weight, "gauge": str(root / "gauge.safetensors")}
    models = [
        {"model": str(source), "parameters": weight},
        {"model": str(root / "twin"), "parameters": guided},
    ]
    (root / "recipe.yml").write_text(
        yaml.safe_dump({"merge_method": "signed_align", "models": models, "dtype": "float32"})
    )
    return root


COMMANDS = {
    "apply": ["apply", "gauge.safetensors", "source", "-o"],
    "port of a file": [
        "port", "vectors.pt", "--gauge", "gauge.safetensors", "--any-source", "-o",
    ],
    "port": ["port", "vectors", "--gauge", "gauge.safetensors", "--any-source", "-o"],
    "merge": ["merge", "recipe.yml"],
    "gauge": ["gauge", "source", "twin", "--from", "weights", "--spaces", "all", "-o"],
}  # fmt: skip


def run(work, name, out):
    """Run a command; its exit code, and its one sentence if it has one."""
    command, *arguments = COMMANDS[name]
    paths = [
        str(work / one) if (work / one).exists() and not one.startswith("-") else one
        for one in arguments
    ]
    result = CliRunner().invoke(main, [command, *paths, str(out)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == (1 if result.exit_code else 0), result.output
    assert "Traceback" not in result.output
    return result.exit_code, "".join(lines)


def suffix(name):
    return {"port of a file": "out.pt", "gauge": "out.safetensors"}.get(name, "out")


SIZES = {"gauge": "4k", "port of a file": "64k"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(work, tmp_path, name):
    with disk(tmp_path / "disk", SIZES.get(name, "160k")) as remount:
        out = tmp_path / "disk" / suffix(name)
        code, sentence = run(work, name, out)
        assert code == 2, sentence
        assert "disk is full" in sentence
        assert "free" in sentence
        assert list(out.parent.iterdir()) == []
        remount("size=8m")
        assert run(work, name, out) == (0, "")
        assert out.exists()
        assert workplaces(out.parent) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_read_only_disk_is_one_sentence(work, tmp_path, name):
    with disk(tmp_path / "disk", "8m") as remount:
        out = tmp_path / "disk" / "folder" / suffix(name)
        remount("ro")
        code, sentence = run(work, name, out)
        assert code == 2
        assert "read-only" in sentence
        remount("rw")
        assert run(work, name, out) == (0, "")


def test_a_disk_that_becomes_read_only_half_way(tmp_path):
    match = r"writing .*out failed: the file system is read-only"
    with pytest.raises(OutputError, match=match), atomic_path(tmp_path / "out", directory=True):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("name", ["apply", "port", "port of a file", "merge"])
def test_a_file_that_may_not_grow_is_one_sentence(work, tmp_path, name):
    """As a full disk, where no disk can be mounted: a limit on the size of files."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / suffix(name)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limit[1]))
    try:
        code, sentence = run(work, name, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert code == 2, sentence
    assert f"writing {out} failed" in sentence
    assert list(tmp_path.iterdir()) == []
    assert run(work, name, out) == (0, "")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_when_it_is_flushed_is_an_error(tmp_path, monkeypatch, code):
    write(tmp_path / "out", "old")

    def fail(_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OutputError, match=r"writing .*out failed: the disk"):
            write(tmp_path / "out", "new", force=True)
    assert read(tmp_path / "out") == ("old", None)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_cannot_be_flushed_is_none(tmp_path, monkeypatch):
    def cannot(_):
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(os, "fsync", cannot)
    write(tmp_path / "out", "new", directory=True)
    assert read(tmp_path / "out") == ("new", "new")


def test_everything_is_flushed_before_it_has_its_name(tmp_path, monkeypatch):
    out, flushed = tmp_path / "out", []
    real = os.fsync

    def note(descriptor):
        flushed.append((os.fstat(descriptor).st_ino, out.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write(out, "new", directory=True)
    for place in (out, out / "one", out / "sub", out / "sub" / "two"):
        assert (place.stat().st_ino, False) in flushed
    assert flushed[-1] == (tmp_path.stat().st_ino, True)


BAD_NAMES = {
    "too long": ("x" * 300, "name is too long"),
    "a NUL": ("a\0b", "characters"),
    "half a pair": ("a\ud800b", "characters"),
    "no text": ("a\udcffb", "characters"),
    "below a file": ("file/out", "is not a directory"),
    "far below a file": ("file/a/b/out", "is not a directory"),
}


@pytest.mark.parametrize("case", BAD_NAMES)
@pytest.mark.parametrize("directory", [False, True])
def test_names_that_cannot_be_are_one_sentence(tmp_path, case, directory):
    name, message = BAD_NAMES[case]
    (tmp_path / "file").write_text("x")
    for check in (require_free, write_nothing):
        with pytest.raises(OutputError, match=message) as caught:
            check(tmp_path / name, directory=directory)
        str(caught.value).encode()
        assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def write_nothing(out, *, directory):
    with atomic_path(out, directory=directory):
        raise AssertionError("this cannot be written")


def test_long_names_that_can_be_are_written(tmp_path):
    for name in ("é" * 110, "x" * 230):
        for directory in (False, True):
            out = tmp_path / f"{name}{directory}"
            write(out, "new", directory=directory, record=None)
            assert read(out)
    assert workplaces(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_one_sentence(tmp_path):
    tmp_path.chmod(0o500)
    try:
        for place in (tmp_path / "out", tmp_path / "a" / "out"):
            with pytest.raises(OutputError, match="permission is denied"):
                require_free(place, directory=True)
    finally:
        tmp_path.chmod(0o700)


def test_a_failed_run_takes_the_directories_that_it_made_away(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "a/b/out", directory=True):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_chart_that_cannot_be_kept_is_no_error(tmp_path, monkeypatch):
    from signed_align import chart_cache

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chart_cache, "_encoded", lambda _: {})

    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    chart_cache.store("key", None)
    assert not list(tmp_path.rglob("*.json"))


# ---- sources that change -------------------------------------------------------------------------


def change(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def replace_file(file):
    copy = file.with_name("copy")
    shutil.copy2(file, copy)
    os.replace(copy, file)


def shorten(file):
    os.truncate(file, file.stat().st_size - 5000)


CHANGES = [change, replace_file, shorten, Path.unlink]


@pytest.fixture
def copied(work, tmp_path):
    return shutil.copytree(work, tmp_path / "work")


@contextmanager
def half_way(monkeypatch, module, name, action):
    """Do something just after the first call of a function."""
    real, done = getattr(module, name), []

    def then(*arguments, **options):
        result = real(*arguments, **options)
        if not done:
            done.append(action())
        return result

    with monkeypatch.context() as patched:
        patched.setattr(module, name, then)
        yield
    assert done


@pytest.mark.parametrize("action", CHANGES)
@pytest.mark.parametrize("number", [0, -1], ids=["read already", "not yet read"])
def test_a_shard_that_changes_half_way_is_one_sentence(copied, monkeypatch, action, number):
    from signed_align import Gauge, moving

    shard = sorted((copied / "source").glob("*.safetensors"))[number]
    gauge = Gauge.load(copied / "gauge.safetensors")
    with (
        half_way(monkeypatch, moving, "rewrite_safetensors", lambda: action(shard)),
        pytest.raises(SourceError if number == 0 else SignedAlignError) as caught,
    ):
        apply(gauge, copied / "source", copied / "out")
    assert shard.name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (copied / "out").exists()
    assert workplaces(copied) == []


@pytest.mark.parametrize("action", [change, replace_file, Path.unlink])
def test_an_artifact_or_a_model_to_merge_that_changes_is_one_sentence(copied, monkeypatch, action):
    from signed_align import Gauge, adapters
    from signed_align.merge_methods import run as runner

    gauge = Gauge.load(copied / "gauge.safetensors")
    file = copied / "vectors" / "a.pt"
    with (
        half_way(monkeypatch, adapters, "move", lambda: action(file)),
        pytest.raises(SourceError, match=r"a\.pt"),
    ):
        port(copied / "vectors", gauge, copied / "ported", any_source=True)
    recipe = copied / "recipe.yml"
    content = yaml.safe_load(recipe.read_text())
    for model in content["models"]:
        model["model"] = str(copied / Path(model["model"]).name)
    recipe.write_text(yaml.safe_dump(content))
    shard = sorted((copied / "source").glob("*.safetensors"))[0]
    with (
        half_way(monkeypatch, runner, "run_merge", lambda: action(shard)),
        pytest.raises(SignedAlignError, match=shard.name),
    ):
        merge(recipe, copied / "merged")
    assert not (copied / "ported").exists()
    assert not (copied / "merged").exists()
    assert workplaces(copied) == []
