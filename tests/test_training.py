"""Training checkpoints: a moved run goes on as it would have at home, loss by loss."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.optim.lr_scheduler import LinearLR
from transformers import Trainer, TrainerCallback, TrainingArguments

from signed_align import scramble
from signed_align.adapters.optimizer import parameter_labels
from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError, GaugeError
from signed_align.labels import transport_all
from tests import tiny
from tests.porting import port

HALF, WHOLE = 50, 100


class Sentences(torch.utils.data.Dataset):
    """Fixed random tokens."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        sentence = tiny.tokens(8, seed=number)[0]
        return {"input_ids": sentence, "labels": sentence}


class StopAt(TrainerCallback):
    """Ends a run early, with the schedule of the whole."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.step


def train(model, out, make=None, resume=None, stop=WHOLE, **settings):
    """Run Trainer; returns the losses after the first half, step by step."""
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=WHOLE, save_steps=HALF, logging_steps=1, seed=0,
        data_seed=0, per_device_train_batch_size=2, learning_rate=3e-3, weight_decay=0.1,
        use_cpu=True, report_to=[], disable_tqdm=True, logging_nan_inf_filter=False,
        dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    optimizers = (None, None)
    if make is not None:
        optimizer = make(model)
        optimizers = (optimizer, LinearLR(optimizer, 1.0, 0.1, WHOLE))
    trainer = Trainer(
        model, arguments, train_dataset=Sentences(), optimizers=optimizers,
        callbacks=[StopAt(stop)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return [
        entry["loss"]
        for entry in trainer.state.log_history
        if "loss" in entry and entry["step"] > HALF
    ]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def quiet(capsys):
    """Trainer prints every loss."""
    yield
    capsys.readouterr()


def departure(home, away):
    """The largest relative difference of losses, over the steps that both runs have."""
    assert len(away) > 2
    return max(abs(a - b) / abs(a) for a, b in zip(home, away, strict=False))


def fresh():
    """A model that shares nothing with the one in training: all comes from the checkpoint."""
    return tiny.build("llama", seed=9, num_hidden_layers=1)


def muon(model):
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=2e-3)


RUNS = {
    "AdamW": (None, {"optim": "adamw_torch"}),
    "transformers Adafactor": (None, {"optim": "adafactor"}),
    "SGD": (lambda model: torch.optim.SGD(model.parameters(), lr=3e-2, momentum=0.9), {}),
    "Adafactor": (lambda model: torch.optim.Adafactor(model.parameters(), lr=3e-3), {}),
    "Muon": (muon, {}),
}
EVEN_ONLY = {"transformers Adafactor", "Adafactor"}


@pytest.mark.parametrize("name", RUNS)
def test_a_moved_run_goes_on_as_it_would_have(tmp_path, name):
    make, settings = RUNS[name]
    model = tiny.build("llama", num_hidden_layers=1)
    losses = train(model, tmp_path / "home", make, **settings)
    assert len(losses) == WHOLE - HALF
    checkpoint = tmp_path / "home" / f"checkpoint-{HALF}"
    gauge = scramble(checkpoint, tmp_path / "twin", seed=3, spaces=["all"])
    moved = tmp_path / "moved" / checkpoint.name
    report = port(checkpoint, gauge, moved)
    assert report["kind"] == "Trainer checkpoint"
    assert report["source_verified"]
    assert report["left_out"] == []
    assert report["notes"] == []
    names = {file.name for file in checkpoint.iterdir()}
    assert {file.name for file in moved.iterdir()} == {*names, "signed_align.json"}
    for kept in ("config.json", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        assert (moved / kept).read_bytes() == (checkpoint / kept).read_bytes()

    away = fresh()
    arrived = train(away, tmp_path / "away", make, resume=moved, **settings)
    # Muon orthogonalises in bfloat16, whose rounding depends on the order of coordinates.
    weight_tolerance = 1e-2 if name == "Muon" else 1e-3
    assert len(arrived) == len(losses)
    chart = Checkpoint.open(checkpoint).chart
    final = transport_all(model.state_dict(), parameter_labels(chart), gauge)
    for key, tensor in away.state_dict().items():
        assert tiny.relative_change(final[key], tensor) <= weight_tolerance
    assert departure(losses, arrived) <= 1e-4

    controls = [checkpoint]
    if name not in EVEN_ONLY:
        port(checkpoint, gauge.without_signs(), tmp_path / "permuted", verify=False)
        controls.append(tmp_path / "permuted")
    for control in controls:
        # the weights arrive, the moments do not, or not with their signs
        shutil.copyfile(control / "optimizer.pt", moved / "optimizer.pt")
        lost = train(fresh(), tmp_path / "lost", make, resume=moved, stop=HALF + 10, **settings)
        assert departure(losses, lost) > 5e-4


def test_there_and_back_is_the_same_checkpoint(tmp_path):
    model = tiny.build("mixtral", num_local_experts=4, num_hidden_layers=1)
    train(model, tmp_path / "home", stop=HALF)
    checkpoint = tmp_path / "home" / f"checkpoint-{HALF}"
    tiny.save(model, checkpoint, shard="100KB")
    (checkpoint / "model.safetensors").unlink()
    gauge = scramble(checkpoint, tmp_path / "twin", seed=3, spaces=["all"])
    port(checkpoint, gauge, tmp_path / "away")
    port(tmp_path / "away", gauge, tmp_path / "back", inverse=True)
    for file in sorted(checkpoint.iterdir()):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
    # shards are as `apply` moves them, experts that are stored one by one included
    for shard in checkpoint.glob("*.safetensors"):
        assert (tmp_path / "away" / shard.name).read_bytes() != shard.read_bytes()
        twin = (tmp_path / "twin" / shard.name).read_bytes()
        assert (tmp_path / "away" / shard.name).read_bytes() == twin


ADAPTERS = {
    "LoRA": {"target_modules": ["q_proj", "o_proj", "gate_proj", "down_proj"]},
    "DoRA and saved modules": {
        "target_modules": ["v_proj", "up_proj"],
        "use_dora": True,
        "modules_to_save": ["lm_head"],
        "bias": "lora_only",
    },
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_in_training_goes_on_as_it_would_have(tmp_path, name):
    tiny.save(tiny.build("llama", num_hidden_layers=1), tmp_path / "base")
    gauge = scramble(tmp_path / "base", tmp_path / "twin", seed=3, spaces=["all"])

    def adapted(base):
        torch.manual_seed(0)
        return get_peft_model(tiny.load(base), LoraConfig(r=4, **ADAPTERS[name]))

    model = adapted(tmp_path / "base")
    losses = train(model, tmp_path / "home", optim="adamw_torch")
    checkpoint = tmp_path / "home" / f"checkpoint-{HALF}"
    moved = tmp_path / "moved"
    report = port(checkpoint, gauge, moved)
    assert report["kind"] == "Trainer checkpoint"
    assert report["source_verified"]
    config = json.loads((moved / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "twin")
    arrived = train(
        adapted(tmp_path / "twin"), tmp_path / "away", resume=moved, optim="adamw_torch"
    )
    assert len(arrived) == WHOLE - HALF
    assert departure(losses, arrived) <= 1e-4
    port(checkpoint, gauge.without_signs(), tmp_path / "permuted", verify=False)
    for control in (checkpoint, tmp_path / "permuted"):
        shutil.copyfile(control / "optimizer.pt", moved / "optimizer.pt")
        lost = train(
            adapted(tmp_path / "twin"), tmp_path / "lost", resume=moved, stop=HALF + 10,
            optim="adamw_torch",
        )  # fmt: skip
        assert departure(losses, lost) > 5e-4

    port(checkpoint, gauge, tmp_path / "again")
    port(tmp_path / "again", gauge, tmp_path / "back", inverse=True)
    for file in ("adapter_model.safetensors", "optimizer.pt", "adapter_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (checkpoint / file).read_bytes()


def test_the_moments_of_a_soft_prompt_move_as_the_prompt(tmp_path):
    base = tiny.save(tiny.build("llama", num_hidden_layers=1), tmp_path / "base")
    gauge = scramble(base, tmp_path / "twin", seed=3, spaces=["all"])
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(tiny.load(base), config)
    (prompt,) = (p for p in model.parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW([prompt])
    model(input_ids=tiny.tokens(8), labels=tiny.tokens(8)).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "run")
    torch.save(optimizer.state_dict(), tmp_path / "run" / "optimizer.pt")
    port(tmp_path / "run", gauge, tmp_path / "moved")
    moved = torch.load(tmp_path / "moved" / "optimizer.pt", weights_only=True)["state"][0]
    state, element = optimizer.state[prompt], gauge.elements["residual"]
    assert torch.equal(moved["exp_avg"], element.apply(state["exp_avg"], 1))
    assert torch.equal(moved["exp_avg_sq"], element.apply(state["exp_avg_sq"], 1, signed=False))


# ---- what cannot be moved --------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of one step, and a gauge from it."""
    root = tmp_path_factory.mktemp("run")
    model = tiny.build("llama", num_hidden_layers=1)
    place = tiny.save(model, root / "checkpoint-1")
    optimizer = torch.optim.AdamW(model.parameters())
    model(tiny.tokens(8), labels=tiny.tokens(8)).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), place / "optimizer.pt")
    (place / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    (place / "scheduler.pt").write_bytes(b"")
    return place, scramble(place, root / "twin", seed=3, spaces=["all"])


def spoiled(checkpoint, tmp_path, change):
    place = tmp_path / "checkpoint-1"
    shutil.copytree(checkpoint[0], place)
    change(place)
    return place


def deepspeed(place):
    place.mkdir(parents=True)
    (place / "mp_rank_00_model_states.pt").touch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda place: deepspeed(place / "global_step1"), "DeepSpeed"),
        (lambda place: (place / "pytorch_model_fsdp_0").mkdir(), "FSDP"),
        (lambda place: (place / "pytorch_model_fsdp.bin").touch(), "FSDP"),
        (lambda place: (place / "optimizer_0").mkdir(), "FSDP"),
        (lambda place: (place / "checkpoint-is-incomplete.txt").touch(), "not written to its end"),
        (lambda place: (place / "rank0-of-2-optimizer.pt").touch(), "XLA"),
        (lambda place: (place / "optimizer.pt").write_bytes(b"damaged"), "optimizer.pt"),
    ],
)
def test_checkpoints_that_cannot_move_are_refused(tmp_path, checkpoint, change, message):
    place = spoiled(checkpoint, tmp_path, change)
    with pytest.raises(ArtifactError, match=message):
        port(place, checkpoint[1], tmp_path / "moved")
    assert not (tmp_path / "moved").exists()


def test_a_deepspeed_directory_without_weights_is_refused_with_the_reason(tmp_path, checkpoint):
    deepspeed(tmp_path / "deep" / "global_step7")
    with pytest.raises(ArtifactError, match="DeepSpeed"):
        port(tmp_path / "deep", checkpoint[1], tmp_path / "moved")


def test_the_checkpoint_must_be_the_source_of_the_gauge(tmp_path, checkpoint):
    place, gauge = checkpoint
    other = tiny.save(tiny.build("llama", seed=4, num_hidden_layers=1), tmp_path / "other")
    shutil.copyfile(place / "optimizer.pt", other / "optimizer.pt")
    with pytest.raises(GaugeError, match="another checkpoint"):
        port(other, gauge, tmp_path / "moved")
    assert not port(other, gauge, tmp_path / "moved", any_source=True)["source_verified"]


def test_what_a_resumed_run_will_miss_is_said(tmp_path, checkpoint):
    place = spoiled(checkpoint, tmp_path, lambda place: (place / "scheduler.pt").unlink())
    settings = json.loads((place / "config.json").read_text()) | {"attention_dropout": 0.1}
    (place / "config.json").write_text(json.dumps(settings))
    notes = port(place, checkpoint[1], tmp_path / "moved")["notes"]
    assert any("scheduler.pt" in note for note in notes)
    assert any("attention_dropout" in note for note in notes)
    (place / "optimizer.pt").unlink()
    notes = port(place, checkpoint[1], tmp_path / "bare")["notes"]
    assert any("fresh optimizer" in note for note in notes)


def test_an_adapter_beside_a_whole_model_is_refused(tmp_path, checkpoint):
    place = spoiled(
        checkpoint, tmp_path, lambda place: (place / "adapter_config.json").write_text("{}")
    )
    with pytest.raises(ArtifactError, match="which of them was trained"):
        port(place, checkpoint[1], tmp_path / "moved")
