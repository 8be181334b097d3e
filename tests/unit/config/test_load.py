from __future__ import annotations

import contextlib
import itertools

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import Field

from agent_tunix.config.load import (
    PLACES,
    config_folder,
    config_text,
    did_you_mean,
    escaped,
    hydra_arguments,
    keys,
    leaves,
    read_saved,
    search_path,
    validate,
    validate_all,
)
from agent_tunix.config.schema import Config, EvaluateConfig, GrpoSection
from agent_tunix.config.section import Section
from agent_tunix.errors import UserError


@pytest.fixture(scope="module")
def composed():
    """The shipped configuration of the quick test."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return OmegaConf.to_container(compose("config", ["+experiment=quick_test"]), resolve=False)


@pytest.fixture
def faults(composed):
    """The lines of the report on a configuration with some values changed."""

    def faults(changes: dict, kind=Config) -> list[str]:
        config = OmegaConf.create(composed)
        for key, value in changes.items():
            OmegaConf.update(config, key, value, force_add=True)
        with pytest.raises(UserError) as stop:
            validate(config, kind)
        head, *lines = str(stop.value).split("\n")
        count = "There is a fault" if len(lines) == 1 else f"There are {len(lines)} faults"
        assert head == f"{count} in the configuration:"
        return [line.strip() for line in lines]

    return faults


def test_the_shipped_configuration_is_valid(composed):
    config = validate(OmegaConf.create(composed), Config)
    assert config.grpo.num_generations == 8
    assert config.model.model_size == "tiny"


def test_a_plain_mapping_is_taken_too(composed):
    assert validate(composed, Config) == validate(OmegaConf.create(composed), Config)


PROMPTS = ["Grüße: 1 ≠ 2\n# no comment", "${seed} is no key, ${", r"\${seed}", r"C:\ and \\${x} \\"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_what_is_written_is_read_again_the_same(composed, tmp_path, prompt):
    config = validate(composed | {"data": composed["data"] | {"system_prompt": prompt}}, Config)
    assert config.data.system_prompt == prompt
    (tmp_path / "config.yaml").write_text(config_text(config), encoding="utf-8")
    assert validate(read_saved(tmp_path / "config.yaml"), Config) == config
    assert validate(OmegaConf.load(tmp_path / "config.yaml"), Config) == config, (
        "also where its author includes it in another"
    )


@pytest.mark.parametrize("written", ["learning_rate: 1.0e-05", "lora_alpha: 8192.0", "- 0.999", "num_batches: 40"])
def test_a_digit_that_has_changed_on_the_disk_is_refused(composed, tmp_path, written):
    """Each of these is a value that can be, by which a run would go on and end elsewhere."""
    file = tmp_path / "config.yaml"
    text = config_text(validate(composed, Config))
    assert written in text
    file.write_text(text.replace(written, written.replace("9", "8") if "9" in written else written + "1"))
    with pytest.raises(UserError, match=r"config.yaml does not hold the values that were written.*\n.*\n.*delete that line"):
        read_saved(file)


def test_places_order_and_comments_may_be_written_anew_and_old_files_have_no_checksum(composed, tmp_path):
    config, file = validate(composed, Config), tmp_path / "config.yaml"
    first, *lines = config_text(config).splitlines()
    moved = ["  weights: /moved" if line.startswith("  weights: package") else line for line in lines]
    at = lines.index("generation:")
    for text in ([first, *moved, "# mine"], [first, *lines[at:], *lines[:at]], [line.replace("40", "41") for line in lines]):
        file.write_text("\n".join(text))
        validate(read_saved(file), Config)


@given(st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_bit_of_it_has_changed_it_is_refused_or_says_the_same(composed, tmp_path, rng):
    config, file = validate(composed, Config), tmp_path / "config.yaml"
    content = bytearray(config_text(config).encode())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    with contextlib.suppress(UserError):
        found = leaves(validate(read_saved(file), Config).model_dump())
        assert {key for key, value in leaves(config.model_dump()).items() if found[key] != value} <= {*PLACES}


@given(st.text("\\${}x:", max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_itself_after_it_was_saved(tmp_path, text):
    OmegaConf.save(OmegaConf.create({"texts": [escaped(text)]}), tmp_path / "config.yaml")
    assert read_saved(tmp_path / "config.yaml")["texts"] == [text]


@pytest.mark.parametrize("before", ["", "as in ", "\\\\", "\\${x} "])
def test_what_a_saved_configuration_would_have_looked_up_is_refused_with_file_and_keys(tmp_path, monkeypatch, before):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    reference = before + "${oc.env:HF_TOKEN}"
    written = {"data": {"system_prompt": reference, "subset": "plain"}, "seed": "${oc.env:SEED}", "lists": [[1, "${seed}"]]}
    OmegaConf.save(OmegaConf.create(written), tmp_path / "config.yaml")
    with pytest.raises(UserError) as refusal:
        read_saved(tmp_path / "config.yaml")
    said = str(refusal.value).splitlines()
    assert said[0].startswith(f"{tmp_path / 'config.yaml'}: ")
    assert said[1:4] == [f"  data.system_prompt={reference}", "  seed=${oc.env:SEED}", "  lists.0.1=${seed}"]
    assert "hf_secret" not in str(refusal.value)


def test_all_faults_are_reported_together(faults):
    lines = faults(
        {
            "grpo.num_generations": 1,
            "optimizer.learning_rate": "fast",
            "optimizer.learnin_rate": 1e-5,
            "generation.temperature": -1.0,
            "training.batch_size": 6,
            "training.micro_batch_size": 4,
        }
    )
    assert len(lines) == 5
    report = "\n".join(lines)
    for part in (
        "grpo.num_generations=1: must be greater than or equal to 2",
        "optimizer.learning_rate=fast: must be a valid number",
        "optimizer.learnin_rate: unknown key; did you mean optimizer.learning_rate?",
        "generation.temperature=-1: must be greater than or equal to 0.001",
        "batch_size=6 is not a multiple of micro_batch_size=4",
    ):
        assert part in report


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("optimizer.learning_rate", 0.0, "must be greater than 0"),
        ("optimizer.learning_rate", float("nan"), "must be a finite number"),
        ("optimizer.learning_rate", None, "must be a valid number"),
        ("optimizer.betas", [0.9], "must have at least 2 items"),
        ("optimizer.betas", [0.9, 1.0], "must be less than or equal to 0.999999"),
        ("optimizer.betas", [0.9, 0.99999999], "must be less than or equal to 0.999999"),
        ("optimizer.eps", 1e-45, "must be greater than or equal to 1e-30"),
        ("optimizer.optimizer_name", "adam", "must be one of adamw"),
        ("optimizer.decay_norms", True, "optimizer.decay_norms=true: adapters have no norms to decay"),
        ("optimizer.max_grad_norm", 0.0, "must be greater than 0"),
        ("generation.max_generation_steps", 200000, "must be less than or equal to 131072"),
        ("optimizer.warmup_ratio", 1.5, "must be less than or equal to 1"),
        ("scheduler.warmup_steps", -1, "must be greater than or equal to 0"),
        ("scheduler.lr_min", 1.0, "scheduler.lr_min=1 is above optimizer.learning_rate=1e-05"),
        ("scheduler.lr_min", None, "scheduler: scheduler_name=warmup_cosine needs lr_min"),
        ("scheduler.num_cycles", 3, "scheduler: scheduler_name=warmup_cosine does not use num_cycles"),
        ("scheduler.decay_ratio", 0.2, "scheduler: scheduler_name=warmup_cosine does not use decay_ratio"),
        ("grpo.epsilon", 0.0, "must be greater than 0"),
        ("grpo.beta", -0.1, "must be greater than or equal to 0"),
        ("grpo.num_iterations", 1.5, "must be a valid integer"),
        ("generation.temperature", 1e-40, "must be greater than or equal to 0.001"),
        ("generation.top_p", 0.0, "must be greater than 0"),
        ("generation.top_k", 0, "must be greater than or equal to 1"),
        ("training.micro_batch_size", 0, "must be greater than or equal to 1"),
        ("training.micro_batch_size", "4", "must be a valid integer"),
        ("training.train_fraction", 0.0, "must be greater than 0"),
        ("evaluation.sampled", "yes", "must be a valid boolean"),
        ("training.keep_best", "loss", "training.keep_best=loss: must be 'accuracy', 'sampled_accuracy'"),
        ("evaluation.sets", {"a/b": {"path": "x.jsonl"}}, "'a/b' is no name for a set"),
        ("evaluation.sets", {"hard": 3}, "evaluation.sets.hard=3: must be a valid dictionary"),
        ("evaluation.sets", {"hard": "gsm8q"}, "evaluation.sets: there is no gsm8q; did you mean gsm8k?"),
        ("evaluation.sets", {"hard": {"pth": "x.jsonl"}}, "evaluation.sets.hard.pth: unknown key; did you mean path?"),
        ("evaluation.sets", {"hard": {"num_examples": 3}}, "evaluation.sets.hard.num_examples: unknown key; it is one of"),
        ("evaluation.sets", {"hard": {"answer_pattern": "x"}}, "evaluation.sets.hard.answer_pattern=x: has no group"),
        ("evaluation.sets", {"hard": {"path": 3}}, "evaluation.sets.hard.path=3: must be a valid string"),
        ("training.init_step", "last", "training.init_step=last: must be a step, a whole number from 0 on, or best"),
        ("model.lora_module_path", "(q_proj", "is not a regular expression"),
        ("model.lora_module_path", "(" * 2000 + ")" * 2000, "is not a regular expression: it is nested too deeply"),
        ("data.solve_rate", [0.5], "must have at least 2 items"),
        ("data.solve_rate", [0.9, 0.1], "has its low bound above its high one"),
        ("data.solve_rate", [0.0, 1.5], "must be less than or equal to 1"),
        ("data.path", "a\0b", "must be text, without zero bytes"),
        ("data.system_prompt", "a\ud800b", "must be text, without zero bytes"),
        ("model.mesh_shape", [[2], ["rows"]], "must be [[f,t],[fsdp,tp]]"),
        ("model.mesh_shape", [[0, 1], ["fsdp", "tp"]], "must be [[f,t],[fsdp,tp]]"),
        ("model.mesh_shape", [[1, 2], ["tp", "fsdp"]], "must be [[f,t],[fsdp,tp]]"),
        ("model.lora_rank", -1, "must be greater than or equal to 0"),
        ("model.base_dtype", "int4", "model.base_dtype=int4: must be 'int8' or 'nf4'"),
        ("data.source", "web", "'table'"),
        ("data.answer_pattern", "(", "is not a regular expression"),
        ("data.answer_pattern", "####.*", "has no group"),
        ("data.keep_pattern", "(", "is not a regular expression"),
        ("reward.weights.typo", 1.0, "typo, which reward.functions does not name"),
        ("seed", -1, "must be greater than or equal to 0"),
        ("training", None, "training=null"),
        ("optimizer", None, "optimizer=null"),
    ],
    ids=str,
)
def test_a_value_out_of_bounds_is_one_fault_that_names_key_and_bound(faults, key, value, fault):
    (line,) = faults({key: value})
    assert line.startswith(key.split(".")[0])
    assert fault in line


def test_the_best_is_not_kept_by_a_number_that_no_evaluation_has(faults):
    (line,) = faults({"training.keep_best": "sampled_accuracy", "evaluation.sampled": False})
    assert line.startswith("training.keep_best=sampled_accuracy: no evaluation has it without evaluation.sampled=true")


def test_worked_answers_are_not_chosen_by_how_often_problems_are_solved(faults):
    (line,) = faults({"data.solve_rate": [0.1, 0.9], "training.method": "supervised"})
    assert line.startswith("data.solve_rate: training.method=supervised learns from worked answers")


def test_a_run_does_not_stop_by_evaluations_that_it_does_not_make(faults):
    (line,) = faults({"training.early_stopping": 3, "training.eval_every_n_steps": None})
    assert line.startswith("training.early_stopping=3 counts evaluations; set training.eval_every_n_steps")


def test_a_base_that_is_trained_is_not_quantised(faults):
    (line,) = faults({"model.base_dtype": "nf4", "model.lora_rank": 0})
    assert line.startswith("model.base_dtype=nf4: model.lora_rank=0 trains all weights, so none is frozen")


def test_keys_of_adapters_are_refused_where_there_are_none(faults):
    (line,) = faults({"model.use_rslora": True, "model.lora_rank": 0})
    assert line.startswith("model.use_rslora=true: model.lora_rank=0 trains all weights and has no adapters")


def test_an_average_that_would_be_divided_by_zero_is_refused(faults):
    (line,) = faults({"optimizer.optimizer_name": "schedule_free_adamw", "optimizer.betas": [0.0, 0.99]})
    assert line.startswith("optimizer: schedule_free_adamw interpolates by betas[0], which must be above 0")


def test_a_missing_key_is_named(composed, faults):
    bare = {**composed, "grpo": {k: v for k, v in composed["grpo"].items() if k != "beta"}}
    with pytest.raises(UserError, match=r"grpo\.beta: missing"):
        validate(bare, Config)


def test_an_interpolation_that_leads_nowhere_says_so(composed):
    with pytest.raises(UserError, match=r"does not resolve.*nowhere"):
        validate(OmegaConf.create({**composed, "seed": "${nowhere.at_all}"}), Config)


def test_an_unknown_key_of_an_unknown_group_is_one_fault(faults):
    assert faults({"optimiser.learning_rate": 1e-5}) == ["optimiser: unknown key; did you mean optimizer?"]


@pytest.mark.parametrize(
    ("word", "hint"),
    [("train", "; did you mean train?"), ("trian", "; did you mean train?"), ("xyz", ""), ("", "")],
)
def test_did_you_mean(word, hint):
    """A user's own file may begin with an underscore."""
    assert did_you_mean(word, ["train", "evaluate", "_mine"]) == hint


@pytest.mark.parametrize("value", ["2", "007", "2026_11", "1e5"])
def test_a_folder_may_have_a_number_for_its_name(value):
    arguments = hydra_arguments([f"run={value}", f"training.init_from={value}", "seed=7"])
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        found = compose("evaluate", [argument for argument in arguments if "=" in argument])
    assert (found.run, found.training.init_from, found.seed) == (value, value, 7)


@pytest.mark.parametrize("written", ["~/kept/run", "'~/kept/run'", '"~/kept/run"'])
def test_the_users_own_folder_is_found_where_the_shell_has_left_its_sign(written, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    keys = ["run", "training.resume", "training.init_from", "model.weights", "hydra.run.dir"]
    arguments = hydra_arguments([f"{key}={written}" for key in keys])
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        found = compose("evaluate", arguments, return_hydra_config=True)
    assert {OmegaConf.select(found, key) for key in keys} == {"/home/someone/kept/run"}


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path):
    with pytest.raises(UserError, match=r"absent\.yaml cannot be read"):
        read_saved(tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1,\nb: }")
    with pytest.raises(UserError, match=r"broken\.yaml cannot be read"):
        read_saved(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(UserError, match=r"list\.yaml cannot be read: it does not hold keys"):
        read_saved(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: &a [x, x]\nb: [*a, *a]", "refers to another place of the file.*line 2, column 5"),
        ("a: &a {x: 1}\nb: {<<: *a}", "refers to another place"),
        ("a: &a [*a]", "refers to another place"),
        ("a: !!binary eHg=", "it has a tag, tag:yaml.org,2002:binary"),
        ("a: !!python/object/apply:os.getcwd []", "it has a tag"),
        ("a: [" + "1," * 10_001 + "]", "more than 10000 values"),
        ("a: " + "x" * 2**16, "65,536 are the most"),
        ("a: " + "[" * 2000, "nested too deeply"),
        ("a: " + "1" * 5000, "4300 digits"),
        ("a: \0", "not allowed"),
    ],
    ids=range(10),
)
def test_a_saved_configuration_stands_for_no_more_than_itself(tmp_path, text, why):
    """A few hundred bytes of references to references would take minutes, and gigabytes."""
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"config\.yaml cannot be read: .*{why}"):
        read_saved(tmp_path / "config.yaml")


def test_a_saved_configuration_gets_the_keys_that_came_later(composed, tmp_path):
    """In a section that it has, and as a section of its own; what has no default stays a fault, which names it."""

    class Later(Section):
        name: str = Field(default="as before", description="Came later.")

    class Grpo(GrpoSection):
        objective: str = Field(default="grpo", description="Came later.")

    class Whole(Config):
        grpo: Grpo
        later: Later = Field(default=Later())

    OmegaConf.save(OmegaConf.create(composed | {"seed": 7}), tmp_path / "config.yaml")
    saved = read_saved(tmp_path / "config.yaml", Whole)
    assert (saved["seed"], saved["later"]) == (7, {"name": "as before"})
    assert (saved["grpo"]["objective"], saved["grpo"]["beta"]) == ("grpo", 0.02)
    assert validate(saved, Whole).later.name == "as before"
    OmegaConf.save(OmegaConf.create(composed | {"grpo": {"beta": 0.1}}), tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"grpo\.epsilon: missing"):
        validate(read_saved(tmp_path / "config.yaml", Whole), Whole)


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "sweep", "sweep/0"])
def test_a_conf_that_came_with_a_run_is_not_the_users_own(tmp_path, monkeypatch, place):
    for marker in ("run/config.yaml", "run/metrics.jsonl", "run/checkpoints/1", "sweep/sweep.json", "sweep/0/x"):
        (tmp_path / marker).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / marker).touch()
    (tmp_path / place / "conf").mkdir()
    monkeypatch.chdir(tmp_path / place)
    assert search_path([]) == [config_folder()]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").symlink_to(tmp_path / place / "conf")
    assert search_path([]) == [config_folder()]


def test_keys_are_those_of_the_shipped_files(composed):
    def leaves(tree, prefix=""):
        for name, value in tree.items():
            key = f"{prefix}{name}"
            nested = isinstance(value, dict) and not key.startswith(("reward.", "evaluation.sets", "environment.settings"))
            yield from leaves(value, f"{key}.") if nested else [key]

    optional = {"optimizer.decay_norms", "scheduler.decay_ratio", "scheduler.num_cycles"}
    optional |= {"data.task", "data.level", "data.settings"}  # of data=reasoning_gym
    assert set(leaves(composed)) == set(keys(Config)) - optional


def test_every_shipped_group_composes_and_is_valid():
    def options(group: str) -> list[str]:
        return [f"{group}={path.stem}" for path in sorted((config_folder() / group.lstrip("+")).glob("*.yaml"))]

    groups = map(options, ("model", "optimizer", "scheduler", "data", "generation", "reward", "grpo"))
    of_all_groups = [list(filter(None, one_of_each)) for one_of_each in itertools.zip_longest(*groups)]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        for chosen in (*of_all_groups, *([experiment] for experiment in options("+experiment"))):
            chosen += ["environment.name=my_module.MyWorld"] if "reward=environment" in chosen else []
            assert validate(compose("config", chosen), Config)
        for path in (config_folder() / "inference_config").glob("*.yaml"):
            assert validate(compose("evaluate", [f"inference_config={path.stem}"]), EvaluateConfig)


def test_the_faults_of_several_jobs_are_told_together_and_once(composed):
    def job(rate: float, eps: float) -> dict:
        return {**composed, "optimizer": {**composed["optimizer"], "learning_rate": rate, "eps": eps}}

    with pytest.raises(UserError) as told:
        validate_all([job(-1, -3), job(1e-5, 1e-8), job(-2, -3)], Config)
    assert str(told.value).splitlines() == [
        "There are 3 faults in the configuration:",
        "  optimizer.learning_rate=-1: must be greater than 0",
        "  optimizer.eps=-3: must be greater than or equal to 1e-30",
        "  optimizer.learning_rate=-2: must be greater than 0",
    ]
    assert [cfg.optimizer.eps for cfg in validate_all([job(1e-5, 1e-8), job(1e-5, 1e-7)], Config)] == [1e-8, 1e-7]


def test_a_users_own_folder_is_searched_first_unless_it_is_another_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped, own = config_folder(), tmp_path.resolve() / "conf"
    assert search_path([]) == [shipped]
    own.mkdir()
    assert search_path([]) == [own, shipped]
    assert search_path(["--config-dir=elsewhere"]) == [shipped]
    (own / "config.yaml").touch()
    assert search_path([]) == [shipped, own]
    monkeypatch.chdir(shipped.parent)
    assert search_path([]) == [shipped]


def test_test_sets_are_named_by_files_of_the_group_by_tasks_and_by_paths(composed):
    given = hydra_arguments(["evaluation.sets=[gsm8k,large_arithmetic,reasoning_gym:gcd,sets/hard.jsonl]"])
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        sets = validate(compose("config", ["+experiment=quick_test", *given]), Config).evaluation.sets
    assert list(sets) == ["gsm8k", "large_arithmetic", "gcd", "hard"]
    assert (sets["gsm8k"]["path"], sets["gsm8k"]["subset"]) == ("openai/gsm8k", "main")
    assert (sets["large_arithmetic"]["source"], sets["large_arithmetic"]["level"]) == ("arithmetic", 1)
    assert (sets["gcd"]["source"], sets["gcd"]["task"]) == ("reasoning_gym", "gcd")
    assert sets["hard"] == {"path": "sets/hard.jsonl"}
