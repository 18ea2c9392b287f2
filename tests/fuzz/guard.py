"""What must hold of every input: documented refusals, no hang, no foreign code, no stray file."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from signed_align.errors import SignedAlignError

SECONDS = 10.0
"""An input that takes longer hangs."""

MEMORY = 4 * 2**30
"""Bytes that a process may map beyond what it has when it starts."""

MOST_CHARACTERS = 2000
"""A sentence for people is no longer."""

CANARY = "signed_align_fuzz_canary"
"""Stands in all code that inputs carry: in commands, source texts and names of modules."""

FOREIGN_MODULES = {
    "os",
    "posix",
    "nt",
    "subprocess",
    "runpy",
    "shutil",
    "pty",
    "webbrowser",
    CANARY,
}
FOREIGN_BUILTINS = {"exec", "eval", "compile", "__import__", "open", "breakpoint", "input"}
COMMANDS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen",
            "pty.spawn", "socket.connect", "socket.getaddrinfo", "webbrowser.open"}  # fmt: skip
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
           "os.chmod", "os.chown", "shutil.rmtree", "shutil.copyfile", "shutil.move",
           "os.utime"}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Hang(BaseException):
    """Raised by the alarm; no handler of ordinary exceptions catches it."""


class BrokenError(Exception):
    """Something that must hold does not."""


@dataclass
class Verdict:
    """What one input came to: ``outcome`` is ``returns`` or the class of the refusal."""

    outcome: str = "returns"
    failures: list[str] = field(default_factory=list)


class Guard:
    """Watches the process: there is one, since an audit hook cannot be removed."""

    def __init__(self) -> None:
        self._watching = False
        self._allowed: tuple[str, ...] = ()
        self._seen: list[str] = []
        self._late = False
        sys.addaudithook(self._audit)

    def judge(
        self, steps: list[Callable[[], object]], inside: Path, allowed: list[Path], output: Path
    ) -> Verdict:
        """Run the steps of one input and say what came of it.

        Parameters
        ----------
        steps : list of callable
            What is done with the input, one after the other, whatever the others raise.
        inside : Path
            The directory that holds nothing but the input, which may not change, and the output.
        allowed : list of Path
            Where files may be written.
        output : Path
            What the last step may make, and what begins with its name.
        """
        verdict = Verdict()
        before = _listing(inside)
        os.environ.pop(CANARY, None)
        for step in steps:
            with self._watch([str(path) for path in allowed]):
                failure, refusal = self._run(step)
            if failure:
                verdict.failures.append(failure)
            if refusal and verdict.outcome == "returns":
                verdict.outcome = refusal
            if self._late:
                verdict.failures.append(f"it took longer than {SECONDS:g} s")
        verdict.failures += self._seen
        if CANARY in os.environ:
            verdict.failures.append("code of the input was executed")
        after = _listing(inside)
        written = str(output)
        strays = sorted(
            name
            for name in before.keys() | after.keys()
            if before.get(name) != after.get(name) and not name.startswith(written)
        )
        verdict.failures += [f"{name} was changed, made or removed" for name in strays]
        if refusal and any(name.startswith(written) for name in after):
            verdict.failures.append("a refusal left an output behind")
        return verdict

    def _run(self, step: Callable[[], object]) -> tuple[str | None, str | None]:
        """What is wrong with how a step ended, and the class of a refusal."""
        try:
            step()
        except SignedAlignError as error:
            return _odd_refusal(error), type(error).__name__
        except Hang:
            return None, None
        except BrokenError as error:
            return str(error), None
        except BaseException as error:
            return "".join(traceback.format_exception(error)[-6:])[-3000:], None
        return None, None

    @contextmanager
    def _watch(self, allowed: list[str]) -> Iterator[None]:
        self._allowed, self._seen, self._late = tuple(allowed), [], False
        handler = signal.signal(signal.SIGALRM, self._alarm)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        self._watching = True
        try:
            yield
        finally:
            self._watching = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)

    def _alarm(self, *_: Any) -> None:
        self._late = True
        raise Hang

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        wrong = _wrong(event, arguments, self._allowed)
        if wrong:
            self._watching = False  # describing it may raise events too
            self._seen.append(wrong)
            self._watching = True


def _wrong(event: str, arguments: tuple[Any, ...], allowed: tuple[str, ...]) -> str | None:
    """What is wrong with an event, if anything is."""
    if event in COMMANDS:
        return f"{event} was called: {arguments!r}"[:300]
    if event == "import" and CANARY in str(arguments[0]):
        return "a module that the input names was imported"
    if event == "exec":  # names and constants of code, also of what only an evaluation has
        code = arguments[0]
        if CANARY in repr((getattr(code, "co_names", ()), getattr(code, "co_consts", ()))):
            return "code of the input was executed"
    if event == "pickle.find_class":
        module, name = map(str, arguments[:2])
        if module.split(".")[0] in FOREIGN_MODULES or (
            module == "builtins" and name in FOREIGN_BUILTINS
        ):
            return f"a pickle reached {module}.{name}"
    places: list[Any] = []
    if event == "open" and _is_writing(arguments):
        places = [arguments[0]]
    elif event in CHANGES:
        # a directory descriptor and a mode are numbers; what is copied from is not written
        named = [place for place in arguments if isinstance(place, (str, bytes, os.PathLike))]
        places = named[-1:] if event in ("shutil.copyfile", "os.symlink") else named
    for place in places:
        if isinstance(place, int) or place is None:
            continue
        path = os.path.realpath(os.fsdecode(place))
        own = "__pycache__" in path or path == os.devnull
        # inside a removal paths are relative to a descriptor
        relative = not os.path.isabs(os.fsdecode(place)) and event in ("os.remove", "os.rmdir")
        if not own and not relative and not path.startswith(allowed):
            return f"{event} outside the target: {path}"
    return None


def _is_writing(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = (*arguments, None, None)[:3]
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return isinstance(flags, int) and bool(flags & WRITING)


def _odd_refusal(error: SignedAlignError) -> str | None:
    """What is wrong with the sentence of a refusal, if anything is."""
    text = str(error)
    reasons = {
        "is empty": not text.strip(),
        "has several lines": len(text.splitlines()) > 1,
        "does not end with a full stop": not text.endswith("."),
        f"is longer than {MOST_CHARACTERS} characters": len(text) > MOST_CHARACTERS,
        "cannot be printed": not _is_encodable(text),
        f"has exit code {error.exit_code}": error.exit_code not in (2, 3, 4),
    }
    for reason, holds in reasons.items():
        if holds:
            return f"the refusal {reason}: {type(error).__name__}: {text[:300]!r}"
    return None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _listing(root: Path) -> dict[str, tuple[int, ...]]:
    """Everything below a directory, with what changes if it is written to."""
    found: dict[str, tuple[int, ...]] = {}
    pending = [str(root)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                is_directory = entry.is_dir(follow_symlinks=False)
                stamp = (0,) if is_directory else (status.st_size, status.st_mtime_ns)
                found[entry.path] = (status.st_mode, *stamp)
                if is_directory:
                    pending.append(entry.path)
    return found


def limit_memory() -> None:
    """Let this process map only :data:`MEMORY` more than it has."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
