from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.guidance import half_decades, middle_rate, rate_range, warnings
from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config


def config(*overrides: str) -> Config:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return validate(compose("config", overrides=list(overrides)), Config)


@pytest.mark.parametrize(
    ("model", "low", "high"), [("gemma3_270m", 1e-5, 3e-5), ("gemma3_1b", 1e-6, 1e-5), ("gemma3_4b", 1e-6, 3e-6)]
)
def test_the_ranges_are_the_references(model, low, high):
    assert rate_range(config(f"model={model}"), None)[:2] == (low, high)
    assert warnings(config(f"model={model}", f"optimizer.learning_rate={low}")) == []
    assert warnings(config(f"model={model}", f"optimizer.learning_rate={high}")) == []
    assert len(warnings(config(f"model={model}", f"optimizer.learning_rate={2 * high}"))) == 1


@pytest.mark.parametrize(
    "example",
    [
        ("model=gemma3_4b", "training.micro_batch_size=1", "optimizer.learning_rate=1e-6"),
        ("model=gemma3_270m", "training.micro_batch_size=8", "optimizer.learning_rate=1e-4"),
    ],
)
def test_the_references_own_adjustments_are_not_warned_of(example):
    assert warnings(config(*example)) == []


def test_training_all_weights_and_little_data_ask_for_less():
    usual = rate_range(config(), 5000)[1]
    assert rate_range(config("model.lora_rank=0"), 5000)[1] == pytest.approx(usual / 10)
    assert rate_range(config(), 100)[1] == pytest.approx(usual / 3)
    assert rate_range(config("model.use_rslora=true"), 5000)[:2] == pytest.approx((1e-5 / 32**0.5, usual / 32**0.5))
    few = rate_range(config("training.micro_batch_size=1"), 100)
    assert few[0] == few[1] == pytest.approx(usual / 9), "what is asked for less of all is not called low"
    (line,) = warnings(config("training.micro_batch_size=1", "optimizer.learning_rate=1e-4"), 100)
    assert f" {usual / 9:.2g} suits 270m " in line
    assert "100 examples" in warnings(config("optimizer.learning_rate=3e-5"), 100)[0]


def test_a_warning_names_the_key_the_danger_and_the_remedy():
    (line,) = warnings(config("optimizer.learning_rate=1e-2"))
    for part in ("optimizer.learning_rate=0.01", "may diverge", "set optimizer.learning_rate=3e-05"):
        assert part in line
    (line,) = warnings(config("optimizer.learning_rate=8e-6"))
    assert "may learn very slowly; set optimizer.learning_rate=1e-05" in line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.weight_decay=0.5", "weight_decay=0.5 is outside the typical 0 to 0.1"),
        ("optimizer.max_grad_norm=50", "exploding gradients"),
        ("optimizer.warmup_ratio=0.5", "below the peak rate"),
        ("optimizer.betas=[0.5,0.9]", "are unusual"),
        ("optimizer.eps=0.1", "damped away"),
    ],
)
def test_every_unusual_setting_is_warned_of(override, said):
    (line,) = warnings(config("optimizer.learning_rate=1e-5", override))
    assert said in line


@pytest.mark.parametrize(("model", "middle"), [("tiny", 3e-6), ("270m", 1e-5), ("1b", 3e-6), ("4b", 1e-6)])
def test_a_search_begins_in_the_middle_of_the_guidance(model, middle):
    cfg = config(f"model=gemma3_{model}")
    low, high, _ = rate_range(cfg, None)
    assert middle_rate(cfg) == middle
    assert low <= middle <= high


@pytest.mark.parametrize(("rate", "middle"), [("1e-3", 1e-3), ("5e-3", 3e-3)])
def test_a_search_for_an_optimizer_without_guidance_begins_at_the_runs_own_rate(rate, middle):
    """AdamW's rates are a hundredth of what SGD learns with."""
    cfg = config("model=gemma3_tiny", "optimizer=sgd", f"optimizer.learning_rate={rate}")
    assert middle_rate(cfg) == middle
    assert warnings(cfg) == []


def test_half_decades_are_ones_and_threes():
    assert [half_decades(1e-5, up) for up in (-3, -2, -1, 0, 1, 2)] == [3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4]
    assert [half_decades(rate) for rate in (1.7e-5, 2e-5, 4e-6, 0.9)] == [1e-5, 3e-5, 3e-6, 1.0]
    assert half_decades(0.3, 4) == 1.0, "no rate is above one"


@pytest.mark.parametrize("name", sorted(path.stem for path in (config_folder() / "optimizer").glob("*.yaml")))
def test_no_shipped_optimizer_is_warned_of_for_its_eps_and_betas(name):
    """What is not used, or used otherwise than AdamW uses it, has no typical values."""
    assert not [line for line in warnings(config(f"optimizer={name}")) if "eps" in line or "betas" in line]


def test_rewards_without_a_weight_are_warned_of():
    none = [f"reward.weights.{name}=0" for name in ("format_exact", "format_approximate", "answer", "number")]
    rate = "optimizer.learning_rate=1e-5"
    (line,) = warnings(config(rate, *none))
    assert line.startswith("reward.weights are all 0")
    for weighty in (none[:3], [*none, "+reward.functions.mine=a.b"], [*none, "training.method=supervised"]):
        assert warnings(config(rate, *weighty)) == []


def test_without_a_reference_no_kl_is_watched_and_that_is_said():
    assert not any("training.max_kl" in line for line in warnings(config()))
    assert any("none above training.max_kl is seen" in line for line in warnings(config("grpo.beta=0")))
    assert not any("max_kl" in line for line in warnings(config("grpo.beta=0", "training.method=supervised")))
