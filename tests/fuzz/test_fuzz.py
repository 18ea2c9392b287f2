"""Some hundreds of broken and hostile inputs, of every format; the long run is ``make fuzz``."""

import os
import pickle
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from signed_align.errors import ArtifactError, SignedAlignError, UnreliableGaugeError
from tests.fuzz.guard import CANARY, MOST_CHARACTERS
from tests.fuzz.mutations import _payloads
from tests.fuzz.runner import source_of
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore")

SLOW = {"recipe": 20, "report": 15, "config": 30, "training": 30, "gauge": 40}
QUICK = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", TARGETS)
def test_every_sample_is_read(bench, name):
    """What is mutated would otherwise be rubbish from the start."""
    bench.warm(name)


@pytest.mark.parametrize("name", TARGETS)
def test_broken_and_hostile_files_are_refused_as_documented(bench, name):
    bench.warm(name)

    @settings(QUICK, max_examples=SLOW.get(name, 60))
    @given(st.randoms(use_true_random=True))
    def check(random):
        verdict = bench.judge(bench.prepare(name, random))
        assert not verdict.failures, "\n".join(verdict.failures)

    check()


@pytest.mark.parametrize("name", ["sae", "optimizer", "recipe"])
def test_inputs_of_a_seed_are_always_the_same(bench, name):
    """So that a failure can be seen again by its number."""

    def files(number):
        bench.prepare(name, source_of(7, name, number))
        found = sorted(file for file in bench.inside.rglob("*") if file.is_file())
        return [(file.name, file.read_bytes()) for file in found]

    inputs = [files(number) for number in range(5)]
    assert inputs == [files(number) for number in range(5)]
    assert len({str(one) for one in inputs}) > 1


# ---- what the guard notices ----------------------------------------------------------------------


def judged(bench, step):
    bench.clear()
    return bench.judge([step]).failures


def raising(error):
    def step():
        raise error

    return step


@pytest.mark.parametrize(
    ("error", "noticed"),
    [
        (ValueError("a bug"), "ValueError"),
        (MemoryError(), "MemoryError"),
        (RecursionError("too deep"), "RecursionError"),
        (SystemExit(1), "SystemExit"),
    ],
)
def test_other_exceptions_are_failures(bench, error, noticed):
    assert noticed in judged(bench, raising(error))[0]


def test_refusals_are_none(bench):
    assert judged(bench, raising(ArtifactError("it is not a file."))) == []


@pytest.mark.parametrize("text", ["", "no stop", "two\nlines.", "x" * (MOST_CHARACTERS + 1) + "."])
def test_odd_sentences_are_failures(bench, text):
    error = ArtifactError("it is not a file.")
    error.args = (text,)
    assert "the refusal" in judged(bench, raising(error))[0]


def test_undocumented_exit_codes_are_failures(bench):
    error = type("Odd", (SignedAlignError,), {"exit_code": 1})("it is not a file.")
    assert "exit code 1" in judged(bench, raising(error))[0]


@pytest.mark.parametrize(
    "step",
    [
        lambda: exec(f"import os; os.environ[{CANARY!r}] = '1'"),
        lambda: os.system(f"true {CANARY}"),
        lambda: pickle.loads(b"cos\nsystem\n."),
        lambda: __import__(CANARY),
    ],
)
def test_code_that_runs_is_a_failure(bench, step):
    assert judged(bench, step)


def test_every_payload_runs_code_where_pickles_are_loaded(bench, tmp_path, monkeypatch):
    """They are the threat they stand for."""
    monkeypatch.chdir(tmp_path)
    dangerous = [data for data in _payloads() if CANARY.encode() in data]
    assert len(dangerous) > 30

    def load(data):
        return lambda: pickle.loads(data)

    calls = [data for data in dangerous if b"system" in data or b"exec" in data]
    assert calls
    assert all(judged(bench, load(data)) for data in calls)


def test_files_outside_the_target_are_failures(bench, tmp_path):
    stray = tmp_path / "stray"
    assert "outside the target" in judged(bench, lambda: stray.write_text("x"))[0]
    assert "outside the target" in judged(bench, lambda: os.mkdir(tmp_path / "directory"))[0]
    assert "outside the target" in judged(bench, lambda: os.remove(stray))[0]
    assert judged(bench, lambda: (bench.inside / "new").write_text("x"))


def test_outputs_of_refusals_are_failures(bench):
    def step():
        bench.output.write_text("half")
        raise ArtifactError("it cannot be written.")

    assert "left an output" in judged(bench, step)[-1]


def test_hangs_are_failures(bench, monkeypatch):
    monkeypatch.setattr("tests.fuzz.guard.SECONDS", 0.05)

    def step():
        try:
            while True:
                time.sleep(0.01)
        except Exception:  # what a reader might do
            return

    assert "longer" in judged(bench, step)[0]


# ---- sentences -----------------------------------------------------------------------------------


def test_a_message_is_one_printable_sentence():
    error = ArtifactError("the tensor 'a\nb\x1b[31m\ud800' is odd: " + "x" * 10_000)
    text = str(error)
    assert text.startswith(r"the tensor 'a b\x1b[31m\ud800' is odd: xxx")
    assert text.endswith("x.")
    assert text.isprintable()
    assert len(text) <= MOST_CHARACTERS
    assert str(UnreliableGaugeError("no gauge.", {})) == "no gauge."
