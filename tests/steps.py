"""Writers that are killed at each of their steps: ``python -m tests.steps``.

A process of its own, and a small one, so that it can be forked a thousand times in seconds.
"""

import errno
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from signed_align import filesystem
from signed_align.files import atomic_path, require_free

RECORD = ".signed_align.json"


def workplaces(folder):
    return [file.name for file in folder.iterdir() if ".partial-" in file.name]


def write(out, content, *, directory=False, force=False, record=None):
    """Write an output of two files, or of one with its record."""
    with atomic_path(out, directory=directory, force=force) as draft:
        if directory:
            (draft / "sub").mkdir()
            (draft / "one").write_text(content)
            (draft / "sub" / "two").write_text(content)
        else:
            draft.write_text(content)
            if record:
                draft.with_name(draft.name + RECORD).write_text(record)


def read(out):
    """What stands there: (contents, record), or None."""
    if out.is_dir():
        files = [out / "one", out / "sub" / "two"]
        return tuple(file.read_text() if file.is_file() else "missing" for file in files)
    record = out.with_name(out.name + RECORD)
    said = record.read_text() if record.is_file() else None
    return (out.read_text(), said) if out.is_file() else None


def started(work):
    """The number of a copy of this process that does ``work`` and is gone afterwards."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def outcome(work):
    """The exit code of work in a copy of this process."""
    child = started(work)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(event, work):
    """Do ``work`` in a child that is killed just before its so-manieth step; False if it ended."""

    def count():
        seen = 0

        def hook(name, _):
            nonlocal seen
            if name.split(".")[0] in ("open", "os", "shutil", "tempfile", "fcntl", "ctypes"):
                seen += 1
                if seen == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()

    code = outcome(count)
    assert code in (0, -signal.SIGKILL)
    return code != 0


NO_RENAMES, NO_LINKS = "no renameat2", "no renameat2, no links"
SYSTEMS = ("as it is", NO_RENAMES, NO_LINKS)


def limit(system, patch=setattr):
    """Take away what some file systems do not have."""

    def refuse(*_, **__):
        raise OSError(errno.EPERM, "no links")

    if system != SYSTEMS[0]:
        patch(filesystem, "_rename_with", lambda *_: False)
    if system == NO_LINKS:
        patch(os, "link", refuse)


def exchanges(folder):
    """Whether two directories can change places."""
    for name in "ab":
        (folder / name).mkdir()
    return filesystem.exchange(folder / "a", folder / "b")


CASES = {
    "a new file": ({}, None),
    "a new directory": ({"directory": True}, None),
    "a file over a file": ({"force": True}, {}),
    "a directory over a directory": ({"force": True, "directory": True}, {}),
    "a new file with its record": ({"record": "of new"}, None),
    "both over both": ({"force": True, "record": "of new"}, {"record": "of old"}),
    "a record where there was none": ({"force": True, "record": "of new"}, {}),
    "no record where there was one": ({"force": True}, {"record": "of old"}),
}
"""How the run is made that is killed, and how the output was made that it replaces."""


def survey(folder, case):
    """Kill a run at each of its steps; assert what stands then, and after the next run."""
    options, old = CASES[case]
    kind = {"directory": options.get("directory", False)}
    record = options.get("record")
    out, states, event = folder / "out", set(), 0
    exchanging = exchanges(folder)
    new = ("new", "new") if kind["directory"] else ("new", record)
    before = None
    while True:
        event += 1
        for file in folder.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        if old is not None:
            write(out, "old", **kind, **old)
            before = read(out)
        if not killed_at(event, lambda: write(out, "new", **options)):
            break
        found = read(out)
        if found is None and before is not None:
            assert kind["directory"]
            assert not exchanging  # the one gap there is, mended below
        elif found not in (before, new):  # only the record is ahead, until the next run
            assert found[0] == "old"
            assert not kind["directory"]
        require_free(out, **kind, force=True)  # what every run does first
        assert workplaces(folder) == []
        assert read(out) in (before, new)
        states.add(read(out))
        write(out, "new", **{**options, "force": True})
        assert read(out) == new
        assert workplaces(folder) == []
    assert states == {before, new}
    return event


def main():
    os.fsync = lambda _: None  # slow, and of no matter to a kill
    limit(sys.argv[1])
    steps = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            steps[case] = survey(Path(folder), case)
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
