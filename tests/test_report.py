"""The page: every result has its section, every plot is in it and beside it, nothing is trusted."""

import base64
import json
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from signed_align import Gauge, SignedAlignError, transport_along
from signed_align.audit import draw_audit, plot_audit
from signed_align.barrier import LossPath, draw_paths, plot_paths
from signed_align.report import reading, report
from signed_align.report.figures import Accuracies, Point, draw_accuracies, pooled_margins
from signed_align.report.kinds import KINDS, kind_of_data
from signed_align.report.shapes import Curves, Recovery
from signed_align.report.tables import MOST_LISTED, MOST_ROWS, facts, grid, text_of
from signed_align.trajectory import draw_trajectory, plot_trajectory
from tests import tiny
from tests.test_audit import BLOCK, written
from tests.test_cli import fails, run
from tests.test_lora import adapter_on
from tests.test_recovery import TEXT, add_tokenizer
from tests.test_sae import build as build_sae

DEMO = Path(__file__).parents[1] / "benchmarks" / "results" / "demo.json"
ORIGIN = {"machine": "m", "python": "3", "date": "2026-01-01", "command": "python benchmarks/x.py"}
PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = "<script>alert(1)</script><img src=http://example.org/x>"


# ---- results, as users have them -----------------------------------------------------------------


def recovered(noise, layers, tokens, objective, sign, permutation=1.0):
    return {
        "noise": noise, "layers": layers, "tokens": tokens, "objective": objective,
        "permutation_accuracy": permutation, "sign_accuracy": sign, "median_margin": 0.5,
    }  # fmt: skip


RECOVERY = {
    "grid": [
        recovered(noise, layers, tokens, objective, accuracy)
        for noise in (0.0, 0.5)
        for layers in ("shallow", "deep")
        for tokens, accuracy in ((128, 0.5 - noise / 2), (512, 1.0 - noise / 2))
        for objective in ("sign_marginalized", "signed")
    ],
    "ceiling": [
        {"positive_fraction": share, "signed": share, "permutation": 1, "sign_marginalized": 1.0}
        for share in (0.25, 0.5, 1.0)
    ],
    **ORIGIN,
}


def spread(mean):
    return {"mean": mean, "deviation": 0.1, "values": [mean - 0.1, mean + 0.1]}


TRAJECTORIES = {
    "curves": [
        {
            "learning_rate": rate, "interval": interval, "steps": steps, "seeds": [1, 2],
            "transport": spread(0.9 - interval / 100), "endpoint": spread(0.5 - steps / 1000),
            "via_base": spread(0.25),
        }
        for rate in (0.001, 0.01) for interval in (10, 20) for steps in (100, 200)
    ],
    **ORIGIN,
}  # fmt: skip
EVALUATE = {
    "task": "arc", "accuracy": 0.625, "examples": 40, "metrics": {"acc": 0.625}, "warnings": [],
}  # fmt: skip
MERGE = {
    "out": "merged", "merge_method": "signed_align", "reference": "a", "warnings": [],
    "gauges": [
        {
            "source": {"name": "b"}, "target": {"name": "a"}, "provenance": {"method": "weights"},
            "spaces": {"residual": {"margin": {"min": 0.125}, "weak_fraction": 0.0}},
        }
    ],
}  # fmt: skip

KIND_OF = {
    "apply.json": "apply",
    "audit.json": "audit",
    "barrier.json": "barrier",
    "bench.json": "benchmark",
    "demo.json": "demo",
    "diagnose.json": "diagnose",
    "error.json": "error",
    "evaluate.json": "evaluate",
    "g.safetensors": "gauge file",
    "gauge.json": "gauge",
    "inspect-adapter.json": "inspect",
    "inspect-gauge.json": "inspect gauge",
    "inspect-model.json": "inspect model",
    "merge.json": "merge",
    "no-gauge.json": "no gauge",
    "peft.json": "support --peft",
    "port.json": "port",
    "recovery.json": "benchmark: recovery",
    "sae.json": "evaluate --sae",
    "scramble.json": "scramble",
    "steer.json": "steer",
    "support.json": "support",
    "t.safetensors": "gauge file",
    "trajectories.json": "benchmark: trajectories",
    "transport.json": "transport",
    "true.safetensors": "gauge file",
}
PLOTS_OF = {
    "audit.json": ["audit"],
    "barrier.json": ["barrier"],
    "demo.json": ["recovery", "barrier"],
    "g.safetensors": ["margins"],
    "gauge.json": ["margins"],
    "recovery.json": ["tokens", "layers", "ceiling"],
    "t.safetensors": ["margins"],
    "trajectories.json": ["steps", "interval"],
    "transport.json": ["trajectory", "margins"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What commands print about a tiny model and its twin, a file a command."""
    root = tmp_path_factory.mktemp("report")
    folder = root / "results"
    folder.mkdir()
    source, twin, text = root / "source", root / "twin", root / "text.txt"
    truth = folder / "true.safetensors"
    add_tokenizer(tiny.save(tiny.build("llama"), source))
    adapter_on(source, root / "adapter", target_modules=["q_proj"])
    build_sae("topk", root / "sae")
    torch.save({BLOCK: torch.randn(tiny.WIDTH)}, root / "vector.pt")
    (root / "prompts.txt").write_text("ab\ncde\n")
    (root / "claim.json").write_text(json.dumps(written(negative=TEXT[6:12])))
    text.write_text("\n".join(TEXT))

    def keep(name, *arguments, code=0):
        result = run(*arguments, "--json", "--quiet", code=code)
        (folder / f"{name}.json").write_text(result.stdout)

    keep("scramble", "scramble", source, "-o", twin, "--spaces", "residual,mlp",
         "--save-gauge", truth)  # fmt: skip
    keep("gauge", "gauge", source, twin, "-o", folder / "g.safetensors", "--truth", truth,
         "--spaces", "residual,mlp")  # fmt: skip
    keep("transport", "transport", source, twin, "-o", folder / "t.safetensors",
         "--from", "weights", "--truth", truth)  # fmt: skip
    keep("barrier", "barrier", source, twin, "--gauge", truth, "--text", text, "--points", 3,
         "--tokens", 64)  # fmt: skip
    keep("audit", "audit", source, "--claim", root / "claim.json", "--twins", 2)
    keep("apply", "apply", truth, source, "-o", root / "applied")
    keep("port", "port", root / "adapter", "--gauge", truth, "-o", root / "ported")
    keep("steer", "steer", source, root / "vector.pt", "--prompts", root / "prompts.txt",
         "--positive", "x", "--negative", "z")  # fmt: skip
    keep("sae", "evaluate", source, "--sae", root / "sae", "--text", text)
    keep("inspect-model", "inspect", source)
    keep("inspect-gauge", "inspect", truth)
    keep("inspect-adapter", "inspect", root / "adapter")
    keep("diagnose", "diagnose", source, twin)
    keep("support", "support", "llama")
    keep("peft", "support", "--peft", "lora", "vera")
    keep("error", "inspect", root / "none", code=2)
    keep("no-gauge", "gauge", source, source, "--shuffle-pairs", "-o", root / "no", code=3)
    shutil.copy(DEMO, folder)
    write(folder / "recovery.json", RECOVERY)
    write(folder / "trajectories.json", TRAJECTORIES)
    write(folder / "evaluate.json", EVALUATE)
    write(folder / "merge.json", MERGE)
    write(folder / "bench.json", {"seconds": {"cp": {"cold": 1.25}}, "rows": [{"a": 1}], **ORIGIN})
    return folder


def write(path, data):
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def load(path):
    return json.loads(path.read_text())


class Page(HTMLParser):
    """What a page holds: by its file the text of a section and its images; and every tag."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.sections = [], [], []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "section":
            self.sections.append({"id": dict(attributes)["id"], "texts": [], "images": []})
        if tag == "img":
            self.sections[-1]["images"].append(dict(attributes)["src"])

    def handle_data(self, data):
        if self.sections and data.strip():
            self.sections[-1]["texts"].append(data.strip())

    def section(self, name):
        """The one whose heading names the file."""
        (one,) = [section for section in self.sections if section["texts"][1:2] == [name]]
        return one

    def says(self, name):
        return " | ".join(self.section(name)["texts"])

    def image_bytes(self, name):
        sources = self.section(name)["images"]
        assert all(source.startswith("data:image/png;base64,") for source in sources)
        return [base64.b64decode(source.partition(",")[2], validate=True) for source in sources]


@pytest.fixture(scope="module")
def made(results, tmp_path_factory):
    """The page of all results, where it is, and what the function returned."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    returned = report(results, out)
    return Page(out), out, returned


# ---- the page ------------------------------------------------------------------------------------


def test_every_file_has_its_section(made):
    page, _, returned = made
    assert returned["files"] == [{"file": name, "kind": KIND_OF[name]} for name in sorted(KIND_OF)]
    assert returned["skipped"] == []
    assert [section["texts"][1] for section in page.sections] == sorted(KIND_OF)
    links = [value for name, value in page.attributes if name == "href"]
    assert links == [f"#{section['id']}" for section in page.sections]


def test_every_kind_is_tested():
    assert set(KIND_OF.values()) == {kind.name for kind in KINDS} | {"gauge file"}


def test_plots_are_in_the_page_and_beside_it(made):
    page, out, returned = made
    folder = out.with_name("report-plots")
    assert sorted(map(Path, returned["plots"])) == sorted(folder.iterdir())
    assert returned["out"] == str(out)
    for number, name in enumerate(sorted(KIND_OF), 1):
        files = [
            folder / f"{number:02}-{Path(name).stem}-{plot}.png" for plot in PLOTS_OF.get(name, ())
        ]
        images = page.image_bytes(name)
        assert images == [file.read_bytes() for file in files], name
        assert all(image.startswith(PNG) for image in images)
    assert sum(map(len, PLOTS_OF.values())) == len(returned["plots"])


def test_the_page_needs_nothing_else(made):
    page, _, _ = made
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href"):
            assert value.startswith(("data:image/png;base64,", "#"))
    assert "url(" not in page.html
    assert "@import" not in page.html


def test_figures_are_those_of_the_files(made, results):
    page, _, _ = made

    def holds(name, *values):
        for value in values:
            assert f"| {text_of(value)} |" in f"{page.says(name)} |", (name, value)

    gauge, transport = load(results / "gauge.json"), load(results / "transport.json")
    holds("gauge.json", gauge["permutation_accuracy"], gauge["kinds"]["mlp"]["margin"]["median"])
    holds("gauge.json", gauge["source"]["name"], gauge["source"]["fingerprint"][:12], "mlp")
    holds("g.safetensors", gauge["kinds"]["mlp"]["margin"]["q05"], gauge["target"]["name"])
    holds("transport.json", transport["steps"][0]["margin"]["min"], transport["sign_accuracy"])
    assert transport["verdict"] == transport["provenance"]["verdict"]
    for name in ("gauge.json", "g.safetensors", "transport.json"):
        assert "verdict · finding | gauge |" in page.says(name), name
    holds("barrier.json", load(results / "barrier.json")["paths"]["straight"]["barrier_nats"])
    audit = load(results / "audit.json")
    holds("audit.json", BLOCK, audit["chance"]["jaccard"], audit["mean"]["as_stated"]["overlap"])
    steer = load(results / "steer.json")
    holds("steer.json", steer["effect"], steer["prompts"][1]["effect"], "cde")
    holds("port.json", "PEFT LoRA adapter", load(results / "port.json")["tensors"])
    holds("inspect-adapter.json", "PEFT LoRA adapter", ["q_proj"])
    holds("inspect-model.json", "llama", "RMSNorm", tiny.WIDTH)
    holds("apply.json", load(results / "apply.json")["bytes"])
    holds("sae.json", load(results / "sae.json")["nmse"])
    holds("support.json", load(results / "support.json")["models"][0]["spaces_proved"])
    holds("peft.json", "LORA", "VERA")
    holds("merge.json", "signed_align", "weights", 0.125)
    holds("evaluate.json", "arc", 0.625, 40)
    holds("demo.json", 0.925, "shallow · sign marginalized", 11.177576588724325)
    holds("bench.json", "seconds · cp · cold", 1.25, "python benchmarks/x.py")
    holds("error.json", load(results / "error.json")["error"])
    holds("trajectories.json", 0.7, 20)
    holds("recovery.json", "sign_marginalized", 512, ORIGIN["command"])
    assert "it was made, not recovered" in page.says("true.safetensors")


def test_results_of_the_benchmarks_are_shown(tmp_path):
    returned = report(DEMO.parent, tmp_path / "page.html", title="All we measured")
    page = Page(tmp_path / "page.html")
    assert returned["skipped"] == []
    assert {one["file"] for one in returned["files"]} == {
        f.name for f in DEMO.parent.glob("*.json")
    }
    assert "<h1>All we measured</h1>" in page.html
    assert "lora · accuracy · home | 0.93" in page.says("spaces.json")


# ---- plots: one drawing, from objects and from JSON ----------------------------------------------


def same_drawing(tmp_path, plot, draw, value, data):
    plot(value, tmp_path / "object.png", "title")
    draw(json.loads(json.dumps(data)), tmp_path / "json.png", "title")
    assert (tmp_path / "object.png").read_bytes() == (tmp_path / "json.png").read_bytes()
    plot(value, tmp_path / "other.png", "another title")
    assert (tmp_path / "object.png").read_bytes() != (tmp_path / "other.png").read_bytes()


def test_a_trajectory_and_its_json_are_drawn_alike(results, tmp_path):
    ends = [load(results / "transport.json")[end]["name"] for end in ("source", "target")]
    for truth in (None, "identity"):
        found = transport_along(ends, method="weights", truth=truth)
        same_drawing(tmp_path, plot_trajectory, draw_trajectory, found, found.to_dict())


def test_a_path_and_its_json_are_drawn_alike(tmp_path):
    paths = {"straight": LossPath([0, 0.5, 1], [2, 5, 3]), "$aligned": LossPath([0, 1], [2, 3])}
    data = {name: path.to_dict() for name, path in paths.items()}
    same_drawing(tmp_path, plot_paths, draw_paths, paths, data)


def test_an_audit_and_its_json_are_drawn_alike(results, tmp_path):
    class Result:
        def to_dict(self):
            return load(results / "audit.json")

    same_drawing(tmp_path, plot_audit, draw_audit, Result(), Result().to_dict())


def test_recovery_is_drawn_as_it_was_measured():
    recovery = Recovery.model_validate(RECOVERY)
    tokens = recovery.by_tokens().panels
    assert list(tokens) == ["noise: 0", "noise: 0.5"]
    assert tokens["noise: 0.5"]["signed"] == {128: Point(0.25), 512: Point(0.75)}
    layers = recovery.by_layer().panels
    assert layers["noise: 0, 512 tokens"] == {
        name: {"shallow": Point(1.0), "deep": Point(1.0)}
        for name in ("sign marginalized", "signed")
    }
    (ceiling,) = recovery.ceilings().panels.values()
    assert ceiling["signed"] == {share: Point(share) for share in (0.25, 0.5, 1.0)}


def test_recovery_averages_hidden_states_and_says_how_far_they_differ():
    grid = [recovered(0, layers, 64, "signed", sign) for layers, sign in ((3, 0.25), ([4], 0.75))]
    data = {**RECOVERY, "grid": [*grid, recovered(0, 5, 32, "signed", 0.5)]}
    recovery = Recovery.model_validate(data)
    assert recovery.by_tokens().panels["noise: 0"]["signed"][64] == Point(0.5, 0.25, 0.25)
    assert recovery.by_layer().panels["noise: 0, 64 tokens"]["signed"] == {
        3: Point(0.25), 4: Point(0.75)
    }  # fmt: skip


def test_recovery_shows_all_hidden_states_by_themselves_and_weights_beside_them():
    grid = [
        recovered("4-bit weights", layers, tokens, "signed", sign)
        for layers, tokens, sign in (
            ("8", 64, 0.25), ("15", 64, 0.5), ("all", 64, 0.75), ("all", 32, 0.5),
            ("weights", None, 1.0),
        )
    ]  # fmt: skip
    recovery = Recovery.model_validate({**RECOVERY, "grid": grid})
    tokens = recovery.by_tokens().panels["noise: 4-bit weights"]["signed"]
    assert tokens == {64: Point(0.75), 32: Point(0.5)}
    layers = recovery.by_layer().panels["noise: 4-bit weights, 64 tokens"]["signed"]
    assert list(layers) == [8, 15, "all", "weights"]
    assert layers["weights"] == Point(1.0)


def test_trajectories_are_drawn_as_they_were_measured():
    curves = Curves.model_validate(TRAJECTORIES)
    steps = curves.by_steps().panels
    assert list(steps) == ["learning rate 0.001", "learning rate 0.01"]
    series = steps["learning rate 0.01"]
    assert list(series) == ["transport, every 10", "transport, every 20", "endpoint", "via base"]
    assert series["endpoint"] == {100: Point(0.4, 0.1, 0.1), 200: Point(0.3, 0.1, 0.1)}
    only = [
        curve
        for curve in TRAJECTORIES["curves"]
        if (curve["interval"], curve["steps"]) != (20, 100)
    ]
    once = Curves.model_validate({"curves": only}).by_steps().panels["learning rate 0.01"]
    assert list(once) == ["transport, every 10", "endpoint", "via base"]
    interval = curves.by_interval().panels["learning rate 0.001, 200 steps"]
    assert interval["transport"] == {10: Point(0.8, 0.1, 0.1), 20: Point(0.7, 0.1, 0.1)}


def test_panels_keep_their_titles(tmp_path):
    drawn = set()
    for panel in ("noise 0", "noise 1"):
        draw_accuracies(
            Accuracies({panel: {"a": {1: Point(0.5)}}}, "x"), tmp_path / "p.png", "title"
        )
        drawn.add((tmp_path / "p.png").read_bytes())
    assert len(drawn) == 2


def test_panels_beyond_the_first_are_counted(tmp_path):
    many = {str(number): {"a": {1: Point(0.5)}} for number in range(20)}
    for panels, file in ((many, "a.png"), (dict(list(many.items())[:12]), "b.png")):
        draw_accuracies(Accuracies(panels, "x"), tmp_path / file)
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_margins_of_a_kind_are_pooled(results):
    gauge = Gauge.load(results / "g.safetensors")
    pooled = pooled_margins(gauge)
    assert list(pooled) == ["residual", "mlp"]
    assert len(pooled["residual"]) == tiny.WIDTH
    assert len(pooled["mlp"]) == 160
    assert pooled["mlp"].sum() == pytest.approx(
        sum(float(m.sum()) for space, m in gauge.margins.items() if space != "residual"), rel=1e-5
    )


# ---- margins are drawn from the gauge that the JSON tells of, or not at all ----------------------


def gauge_page(folder, out):
    report(folder, out / "page.html", force=True)
    page = Page(out / "page.html")
    return len(page.image_bytes("gauge.json")), page.says("gauge.json")


def test_a_gauge_is_found_beside_its_json_or_where_it_was_written(results, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    data = load(results / "gauge.json")
    write(folder / "gauge.json", data)
    assert gauge_page(folder, tmp_path)[0] == 1  # the path is that of the command
    write(folder / "gauge.json", {**data, "gauge": "/nowhere/g.safetensors"})
    images, text = gauge_page(folder, tmp_path)
    assert images == 0
    assert "/nowhere/g.safetensors is not there" in text
    assert text_of(data["margin"]["q05"]) in text  # the quantiles are shown all the same
    shutil.copy(results / "g.safetensors", folder)
    images, text = gauge_page(folder, tmp_path)
    assert images == 1
    assert "is not there" not in text


@pytest.mark.parametrize("change", ["another gauge", "another model", "no gauge"])
def test_another_gauge_is_not_drawn(results, tmp_path, change):
    folder = tmp_path / "folder"
    folder.mkdir()
    data = load(results / "gauge.json")
    shutil.copy(results / "g.safetensors", folder / "h.safetensors")
    if change == "another gauge":
        gauge = Gauge.load(folder / "h.safetensors")
        margins = {space: margin / 2 for space, margin in gauge.margins.items()}
        changed = Gauge(gauge.elements, margins, gauge.source, gauge.target, gauge.provenance)
        changed.save(folder / "h.safetensors", force=True)
    elif change == "another model":
        data["source"]["fingerprint"] = "0" * 64
    else:
        (folder / "h.safetensors").write_bytes(b"damaged")
    write(folder / "gauge.json", {**data, "gauge": "h.safetensors"})
    images, text = gauge_page(folder, tmp_path)
    assert images == 0
    assert "is not the one that this was printed for" in text


# ---- nothing in a file is trusted ----------------------------------------------------------------


def hostile_path():
    return {"alphas": [0, 1], "losses": [1, 2], "chord": [1, 2], "barrier_nats": 0.0}


def test_everything_is_escaped(tmp_path):
    folder = tmp_path / "<b>results"
    folder.mkdir()
    name = "<i>&amp;.json"
    write(folder / "a.json", {"error": HOSTILE})
    write(folder / name, {HOSTILE: HOSTILE, "rows": [{HOSTILE: HOSTILE}], **ORIGIN})
    write(folder / "b.json", {
        "barrier_nats": 0.0, "paths": {HOSTILE: hostile_path(), "$x^{": hostile_path()},
        "warnings": [HOSTILE],
    })  # fmt: skip
    write(folder / "c.json", {"barrier_nats": 0.0, "paths": {HOSTILE: 1}})
    returned = report(folder, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert {one["file"] for one in returned["files"]} == {"a.json", "b.json", name}
    assert not {"script", "b", "i"} & set(page.tags)
    assert page.tags.count("img") == len(returned["plots"]) == 1
    assert "http-equiv" not in page.says(name)
    for file in ("a.json", "b.json", name):
        assert HOSTILE in page.says(file)
    assert "&lt;script&gt;" in page.html
    report(folder, tmp_path / "titled.html", title=HOSTILE)
    assert "script" not in Page(tmp_path / "titled.html").tags


def test_names_that_are_not_text_do_no_harm(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    write(folder / "a.json", {"error": "it failed"})
    with open(bytes(folder) + b"/\xff.json", "w") as file:
        json.dump({"barrier_nats": 0.0, "paths": {"straight": hostile_path()}}, file)
    returned = report(folder, tmp_path / "page.html")
    assert [one["file"] for one in returned["files"]] == ["a.json", "\ufffd.json"]
    assert Page(tmp_path / "page.html").section("\ufffd.json")["images"]


BARRIER = {"barrier_nats": 1.0, "paths": {"straight": hostile_path()}}


def barrier(**changes):
    return {**BARRIER, "paths": {"straight": {**hostile_path(), **changes}}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "it is not JSON"),
        ("", "it is not JSON"),
        (b'{"error": "\xff"}', "not text"),
        ('{"error": NaN}', "it is not JSON: it holds NaN"),
        ('{"error": ' + "9" * 5000 + "}", "it is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"error": "\\ud800"}', "not text"),
        ([1], "does not hold a JSON object"),
        ({"a": 1}, "not the output of a command or benchmark"),
        ({"error": 5}, "'error', but error: Input should be a valid string"),
        ({**BARRIER, "paths": 5}, "'barrier', but paths: Input"),
        ({**BARRIER, "paths": {}}, "'barrier', but paths: "),
        (barrier(losses=["1", 2]), "paths.straight.losses.0"),
        (barrier(losses=[True, 2]), "paths.straight.losses.0"),
        (barrier(losses=[1e308, 2]), "paths.straight.losses.0"),
        (barrier(losses=[10**400, 2]), "paths.straight.losses.0"),
        (barrier(losses=[1]), "different lengths"),
        ({**RECOVERY, "grid": [{}]}, "'benchmark: recovery', but grid.0"),
        ({**TRAJECTORIES, "curves": []}, "'benchmark: trajectories', but curves"),
        *(
            (dict.fromkeys(kind.required.split()), f"of the kind {kind.name!r}, but ")
            for kind in KINDS
            if kind.shape is not None
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_that_is_none_of_ours_is_skipped_with_the_reason(tmp_path, content, reason):
    write(tmp_path / "good.json", EVALUATE)
    write(tmp_path / "odd.json", content)
    returned = report(tmp_path, tmp_path / "page.html")
    ((skipped),) = returned["skipped"]
    assert skipped["file"] == "odd.json"
    assert reason in skipped["reason"]
    page = Page(tmp_path / "page.html")
    assert page.sections[-1]["id"] == "skipped"
    assert skipped["reason"] in " ".join(page.sections[-1]["texts"])
    assert len(skipped["reason"]) <= 300
    (tmp_path / "good.json").unlink()
    with pytest.raises(SignedAlignError, match=r"nothing to report.*odd\.json is skipped"):
        report(tmp_path, tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_safetensors_that_are_no_gauge_are_skipped(results, tmp_path):
    shutil.copy(results.parent / "source" / "model.safetensors", tmp_path)
    (tmp_path / "damaged.safetensors").write_bytes(b"x")
    content = (results / "g.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-8])
    shutil.copy(results / "g.safetensors", tmp_path)
    returned = report(tmp_path, tmp_path / "page.html")
    assert [one["file"] for one in returned["files"]] == ["g.safetensors"]
    assert Counter(one["file"] for one in returned["skipped"]) == Counter(
        ["cut.safetensors", "damaged.safetensors", "model.safetensors"]
    )


def test_files_that_are_too_large_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_BYTES", 100)
    write(tmp_path / "a.json", {"error": "short"})
    write(tmp_path / "b.json", {"error": "long" * 100})
    (skipped,) = report(tmp_path, tmp_path / "page.html")["skipped"]
    assert skipped["file"] == "b.json"
    assert "larger" in skipped["reason"]


def test_an_error_is_listed_as_failed(made):
    page, _, _ = made
    assert page.says("error.json").startswith("A command that failed")
    assert ("class", "failed") in page.attributes


def test_what_no_command_prints_has_no_kind():
    assert kind_of_data({}) is None
    assert kind_of_data({"kind": "model"}) is None
    assert kind_of_data({"machine": "m", "date": "d"}) is None


# ---- tables --------------------------------------------------------------------------------------


def cells(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_nested_objects_become_rows():
    data = {"a": {"b_c": {"d": 1}, "e": None}, "f": [1, [2], "x"], "g": [{"h": True}], "i.j": 0.5}
    rows = cells(facts("", data))
    assert rows[:3] == [["a · b c · d", "1"], ["a · e", "−"], ["f", "1, …, x"]]
    assert rows[3:] == [["g · 1 · h", "yes"], ["i.j", "0.5"]]
    assert cells(facts("", data, ["a.b_c", "f", "none.such"])) == [rows[0], rows[2]]
    assert facts("", data, ["none"]) is None


def test_entries_become_rows_of_a_grid():
    value = {"x": {"m": {"n": 1}}, "y": {"o": "z"}, "odd": 5}
    table = grid("t", value)
    assert table.columns == ["", "m · n", "o"]
    assert cells(table) == [["x", "1", ""], ["y", "", "z"]]
    assert grid("t", [{"a": 1, "b": 2}], columns=["b"]).columns == ["b"]
    assert cells(grid("t", {"p": value}, depth=2))[0] == ["p · x", "1", ""]
    for nothing in (None, 5, [], {}, [1], {"a": 1}, [{}]):
        assert grid("t", nothing) is None


def test_tables_are_limited():
    table = grid("t", [{"a": number} for number in range(MOST_ROWS + 5)])
    assert len(table.rows) == MOST_ROWS
    assert table.left_out == 5
    assert table.folded
    assert text_of(list(range(MOST_LISTED + 3))).endswith("11, … (3 more)")
    assert len(text_of("x" * 10_000)) < 500


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (46080, "46,080"), (0.1234567, "0.1235"), (1e-9, "1e-09"), (123456.7, "123,457"),
        (False, "no"), ([], "none"), ({}, "none"), (float("inf"), "inf"), (2.0, "2"),
        (["a", "b"], "a, b"), (["a, b", "c"], "a, b; c"), ([1000, None], "1,000; −"),
    ],
)  # fmt: skip
def test_numbers_are_written_for_people(value, text):
    assert text_of(value) == text


# ---- outputs -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A directory with one result that is drawn."""
    path = tmp_path / "results"
    path.mkdir()
    write(path / "barrier.json", BARRIER)
    return path


def everything_in(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_nothing_is_replaced_without_force(folder, tmp_path):
    out = tmp_path / "r.v1.html"
    (png,) = report(folder, out)["plots"]
    assert Path(png) == tmp_path / "r.v1-plots" / "01-barrier-barrier.png"
    before = everything_in(tmp_path)
    with pytest.raises(SignedAlignError, match="--force"):
        report(folder, out)
    out.unlink()
    with pytest.raises(SignedAlignError, match=r"r\.v1-plots exists already"):
        report(folder, out)
    out.write_text("another page")
    (tmp_path / "r.v1-plots" / "old.png").touch()
    report(folder, out, force=True)
    assert everything_in(tmp_path) == before  # byte for byte, and the old plot is gone


def test_plots_of_an_earlier_page_do_not_stay(folder, tmp_path):
    out = tmp_path / "report.html"
    report(folder, out)
    write(folder / "barrier.json", {"error": "it failed"})
    assert report(folder, out, force=True)["plots"] == []
    assert not list((tmp_path / "report-plots").iterdir())
    other = tmp_path / "other.html"
    report(folder, other)
    assert not (tmp_path / "other-plots").exists()


def test_a_directory_of_other_things_is_not_replaced(folder, tmp_path):
    (tmp_path / "report-plots").mkdir()
    thesis = tmp_path / "report-plots" / "thesis.tex"
    photo = tmp_path / "report-plots" / "photos.png" / "a.jpg"
    for precious, name in ((thesis, "thesis.tex"), (photo, "photos.png")):
        precious.parent.mkdir(exist_ok=True)
        precious.write_text("precious")
        before = everything_in(tmp_path)
        with pytest.raises(SignedAlignError, match=f"{name}, which no report wrote"):
            report(folder, tmp_path / "report.html", force=True)
        assert everything_in(tmp_path) == before
        precious.unlink()


@pytest.mark.parametrize("force", [False, True])
def test_nothing_half_written_remains(folder, tmp_path, monkeypatch, force):
    out = tmp_path / "report.html"
    if force:
        report(folder, out)
    before = everything_in(tmp_path)
    write(folder / "z.json", BARRIER)

    def fails(paths, file, title):
        Path(file).write_bytes(b"half")
        if "02-" in Path(file).name:
            raise SignedAlignError("no ink")

    monkeypatch.setattr("signed_align.report.kinds.draw_paths", fails)
    with pytest.raises(SignedAlignError, match="no ink"):
        report(folder, out, force=force)
    (folder / "z.json").unlink()
    assert everything_in(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_page_may_lie_among_the_results_but_not_on_them(folder):
    report(folder, folder / "report.html")
    assert (folder / "report-plots").is_dir()
    report(folder, folder / "report.html", force=True)
    with pytest.raises(SignedAlignError, match="overlaps the input"):
        report(folder, folder / "barrier.json", force=True)
    assert load(folder / "barrier.json") == BARRIER
    plots = folder.parent / "x-plots"
    folder.rename(plots)
    with pytest.raises(SignedAlignError, match="no report wrote"):
        report(plots, plots.parent / "x.html", force=True)
    assert load(plots / "barrier.json") == BARRIER


def test_a_directory_with_nothing_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("x")
    (tmp_path / "empty" / "deeper").mkdir()
    write(tmp_path / "empty" / "deeper" / "a.json", {"error": "below is not read"})
    with pytest.raises(SignedAlignError, match=r"nothing to report.*gauge file\.$"):
        report(tmp_path / "empty", tmp_path / "page.html")
    with pytest.raises(SignedAlignError, match="is not a directory"):
        report(tmp_path / "none", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    write(tmp_path / "empty" / "a.json", {"error": "x"})
    for name in ("", "/"):
        with pytest.raises(SignedAlignError):
            report(tmp_path / "empty", name)


def test_the_command_writes_the_page_and_names_what_it_skipped(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "failed.json").write_text('{"error": "no such model."}')
    (tmp_path / "in" / "other.json").write_text('{"a": 1}')
    said = run("report", tmp_path / "in", "-o", tmp_path / "page.html", "--title", "Mine").stdout
    assert "shows 1 files, with 0 plots" in said
    assert "skipped other.json" in said
    assert "Mine" in (tmp_path / "page.html").read_text()
    fails("report", tmp_path / "nowhere", "-o", tmp_path / "other.html", match="nowhere")
