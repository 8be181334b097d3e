"""Types, bounds and meaning of every configuration key. Values live in `conf/`.

A key that comes when there are runs without it also has a default here: the value by which those runs were made, whatever
`conf/` gives to new ones. Their configurations are read with it, so they are still evaluated, judged, exported and resumed.

Hard bounds are errors. The faults of a section are found together with those of all other sections; what a key
means is written once, here, and the documentation's page of keys is generated from it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticUndefined

from agent_tunix.config.mesh_shape import AXES, sizes_of
from agent_tunix.config.section import OneOf, Section
from agent_tunix.errors import calling, unparsed

Positive = Annotated[int, Field(ge=1)]
Step = Annotated[int, Field(ge=0)]
BEST: Literal["best"] = "best"  # in the place of a step: the best of those that a run has kept
Share = Annotated[float, Field(ge=0, le=1)]
Length = Annotated[int, Field(ge=1, le=2**17)]  # in tokens; no Gemma 3 has read more


def Input(default: Any = PydanticUndefined, **given: Any) -> Any:  # noqa: N802  # as pydantic's Field
    """A `Field` that compiled programs take as an input or that only the host reads: fused jobs may differ in it."""
    return Field(default, json_schema_extra={"input": True}, **given)


def _a_step_or_best(step: Any) -> Any:
    if step == BEST or (isinstance(step, int) and not isinstance(step, bool) and step >= 0):
        return step
    raise ValueError(f"must be a step, a whole number from 0 on, or {BEST}")


StepOrBest = Annotated[int | Literal["best"], PlainValidator(_a_step_or_best)]
# What an evaluation of a run says of its completions, each a share of the problems.
Measure = Literal["accuracy", "sampled_accuracy", "lenient_accuracy", "partial_accuracy", "format_accuracy"]


def _compiled(pattern: str) -> re.Pattern[str]:
    with calling(lambda fault: ValueError(f"is not a regular expression: {unparsed(fault)}")):
        return re.compile(pattern)


class GuidanceSection(Section):
    learning_rate: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2)] = Field(
        description="Lowest and highest rate that suit this model; outside of them a run warns."
    )
    prompts: Positive = Field(description="Prompts per update for which these rates hold.")
    measured: bool = Field(
        default=True, description="Whether the rates are the reference's or measured, rather than assumed by size."
    )


class ModelSection(Section):
    model_family: Annotated[str, OneOf("agent_tunix.models.families.table", "FAMILIES")] | None = Field(
        description="Architecture family; a checkpoint of another is refused. null: any, as the checkpoint says."
    )
    model_size: str | None = Field(description="Name of the size, for display; null: by the number of parameters.")
    weights: str = Field(
        description="Where the weights are: a repository of the Hugging Face hub, as owner/name or owner/name@revision, a "
        "folder of safetensors or of an Orbax checkpoint, a .gguf file, or kaggle:<handle>."
    )
    dtype: Literal["float32", "bfloat16"] = Field(description="Type in which the base weights are held and multiplied.")
    base_dtype: Literal["int8", "nf4"] | None = Field(
        default=None,
        description="Hold the frozen matrices in 8 or 4 bits, which saves memory but changes logits; null: as dtype.",
    )
    lora_rank: int = Field(ge=0, description="Rank of the adapters; 0 trains all weights, with float32 masters.")
    lora_alpha: float = Field(gt=0, description="Adapters are scaled by lora_alpha / lora_rank.")
    use_rslora: bool = Field(
        default=False,
        description="Scale adapters by lora_alpha / sqrt(lora_rank), so that a larger rank does not learn less.",
    )
    use_dora: bool = Field(
        default=False,
        description="Adapters have a magnitude for each output too, and turn columns without scaling them (DoRA).",
    )
    lora_module_path: str = Field(
        max_length=2**12, description="Regular expression over Hugging Face module names; modules it finds are adapted."
    )
    adapter: str | None = Field(
        default=None,
        description="PEFT adapter to start from, which is then the reference of the KL term too: a folder, or a repository "
        "of the hub, as owner/name or owner/name@revision.",
    )
    mesh_shape: list[Any] = Field(
        description="Devices as [[f,t],[fsdp,tp]]: f split the batch, t the heads; an axis left out has 1."
    )
    guidance: GuidanceSection | None = Field(
        description="What suits a model of this size; null: what is known of it, or assumed by its size."
    )
    architecture: dict[str, Any] | None = Field(
        description="Numbers that the checkpoint must have, as a run records them; where its format leaves one out, it is "
        "taken from here. null: the checkpoint's own.",
    )

    @field_validator("lora_module_path")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        _compiled(pattern)
        return pattern

    @field_validator("mesh_shape")
    @classmethod
    def _is_a_mesh(cls, mesh_shape: list[Any]) -> list[Any]:
        return [list(sizes_of(mesh_shape)), list(AXES)]


class OptimizerSection(Section):
    optimizer_name: Annotated[str, OneOf("agent_tunix.algorithm.optimizers", "ALGORITHMS")] = Field(
        description="The algorithm that turns gradients into steps."
    )
    learning_rate: float = Input(gt=0, le=1, description="Peak step size; too high diverges, too low learns slowly.")
    weight_decay: float = Input(ge=0, lt=1, description="An update shrinks weights by learning_rate * weight_decay.")
    betas: Annotated[list[Annotated[float, Field(ge=0, le=0.999999)]], Field(min_length=2, max_length=2)] = Input(
        description="Decay rates of the moving averages of the gradient and of its square."
    )
    eps: float = Input(ge=1e-30, description="Added to the denominator; larger damps steps where gradients are tiny.")
    warmup_ratio: Share = Input(description="Fraction of the updates over which the rate rises from 0 to its peak.")
    max_grad_norm: float = Input(gt=0, description="A gradient of a greater global norm is scaled down to this.")
    decay_norms: bool | None = Field(
        default=None, description="Decay norms and biases too where all weights are trained (lora_rank 0); null: no."
    )

    @model_validator(mode="after")
    def _average_divides_by_beta1(self) -> OptimizerSection:
        if self.optimizer_name == "schedule_free_adamw" and self.betas[0] == 0:
            raise ValueError("schedule_free_adamw interpolates by betas[0], which must be above 0; 0.9 is usual")
        return self


SCHEDULES = OneOf("agent_tunix.algorithm.schedules", "SCHEDULES")


class SchedulerSection(Section):
    scheduler_name: Annotated[str, SCHEDULES] = Input(description="Shape of the learning rate over the run.")
    warmup_steps: Annotated[int, Field(ge=0)] | None = Input(description="Updates of warm-up; null: from warmup_ratio.")
    total_steps: Positive | None = Input(description="Update at which lr_min is reached; null: the last of the run.")
    lr_min: Annotated[float, Field(ge=0)] | None = Input(
        default=None, description="Learning rate of the last update; all schedules but constant."
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1)] | None = Input(
        default=None, description="Last fraction of the updates, over which the rate falls to lr_min; wsd only."
    )
    num_cycles: Positive | None = Input(
        default=None, description="Times that the rate falls from the peak to lr_min; cosine_restarts only."
    )

    @model_validator(mode="after")
    def _has_just_the_keys_it_uses(self) -> SchedulerSection:
        name = self.scheduler_name
        takes = inspect.signature(SCHEDULES.rows()[name]).parameters
        for key in ("lr_min", "decay_ratio", "num_cycles"):
            given, used = getattr(self, key) is not None, key in takes
            if used and not given:
                raise ValueError(f"scheduler_name={name} needs {key}; scheduler={name} on the command line gives one")
            if given and not used:
                raise ValueError(f"scheduler_name={name} does not use {key}; leave it out, or set scheduler.{key}=null")
        return self


class GrpoSection(Section):
    objective: Annotated[str, OneOf("agent_tunix.algorithm.objectives", "OBJECTIVES")] = Field(
        default="grpo",
        description="What is maximised: ratio, surrogate and weights of tokens; grpo=<name> sets what goes with it.",
    )
    num_generations: int = Field(ge=2, description="Completions per prompt; they are compared with each other.")
    num_iterations: Positive = Field(description="Updates made from each batch of completions.")
    beta: float = Input(ge=0, description="Weight of the KL divergence from the base model; 0 saves the reference pass.")
    kl_estimator: Annotated[str, OneOf("agent_tunix.algorithm.objectives", "KL_ESTIMATORS")] = Field(
        default="k3", description="Estimate of that divergence which the loss has; the metric kl is always k3."
    )
    kl_correction: bool = Field(
        default=False, description="Weigh each token's divergence by its probability ratio, as TRL does by default."
    )
    epsilon: float = Input(gt=0, lt=1, description="The probability ratio is clipped to 1 +- epsilon.")
    epsilon_high: Annotated[float, Field(gt=0)] | None = Input(
        default=None, description="The ratio is clipped to 1 + epsilon_high from above (cispo: capped); null: epsilon."
    )
    delta: Annotated[float, Field(gt=1)] | None = Input(
        default=None, description="Bound of the ratio from above where the advantage is negative too; null: none."
    )
    sapo_temperature_pos: float = Input(
        default=1.0, gt=0, description="Steepness of sapo's gate where the advantage is positive."
    )
    sapo_temperature_neg: float = Input(
        default=1.05, gt=0, description="Steepness of sapo's gate where the advantage is negative."
    )
    scale_rewards: Annotated[str, OneOf("agent_tunix.algorithm.advantages", "REWARD_SCALES")] = Field(
        default="group",
        description="Standard deviation that advantages are divided by: of the group, of the batch, or none.",
    )
    importance_correction: Annotated[str, OneOf("agent_tunix.algorithm.objectives", "IMPORTANCE_CORRECTIONS")] = Field(
        default="none",
        description="Weigh tokens by trainer / sampler probability, truncated or masked above the cap; it costs a pass.",
    )
    importance_cap: float = Input(default=2.0, gt=1, description="Highest weight of that correction.")
    overlong: Literal["keep", "mask", "penalty"] = Field(
        default="keep",
        description="Completions without an end: learn from them as they are; not at all; or lower the reward of long ones.",
    )
    overlong_buffer: Positive | None = Field(
        default=None, description="Last tokens over which that penalty falls from 0 to -1; null: a quarter of the longest."
    )
    resample_rounds: Annotated[int, Field(ge=0, le=100)] = Field(
        default=0, description="Times that further prompts are drawn for groups whose rewards are all equal."
    )
    shuffle_advantages: bool = Field(
        description="Control experiment: permute advantages within each group, so that nothing can be learnt."
    )


class GenerationSection(Section):
    max_prompt_length: Length = Field(description="Longest prompt, in tokens; longer ones are dropped when data is loaded.")
    max_generation_steps: Length = Field(description="Longest completion, in tokens.")
    temperature: float = Input(ge=1e-3, description="Divides the logits in sampling and in training alike.")
    top_p: float = Field(gt=0, le=1, description="Sample from the smallest set of tokens with this probability.")
    top_k: Positive | None = Field(description="Sample from the k likeliest tokens; null: from all.")


class TrainingSection(Section):
    method: Literal["grpo", "supervised"] = Field(
        description="Learn from rewards, or from the worked answers of the data (a warm start)."
    )
    init_from: str | None = Field(
        description="Folder of a run whose trained model, over its model.weights, this one starts from and is compared with."
    )
    init_step: StepOrBest | None = Field(
        default=None, description="Step of that run to start from; null: its last; best: the best of those that it kept."
    )
    batch_size: Positive | None = Field(
        description="Prompts per update; null: micro_batch_size. A larger batch accumulates gradients."
    )
    micro_batch_size: Positive = Field(
        description="Prompts whose completions go through the model at once; memory grows with it."
    )
    num_batches: Positive | None = Field(description="Batches per epoch, at most what the data holds; null: all of it.")
    num_epochs: Positive = Field(description="Epochs; each takes its batches from the training split in a new order.")
    train_fraction: float = Field(
        gt=0, le=1, description="Share of the training data used; the rest is for validation (arithmetic makes its own)."
    )
    eval_every_n_steps: Positive | None = Field(description="Updates between evaluations; null: only before and after.")
    early_stopping: Positive | None = Field(
        default=None,
        description="Evaluations in a row without a new best, by keep_best or accuracy, after which the run stops; "
        "null: it goes to its end.",
    )
    save_interval_steps: Positive | None = Field(description="Updates between checkpoints; null: only the last.")
    max_checkpoints_to_keep: Positive = Field(description="Checkpoints to keep; older ones are deleted.")
    keep_best: Measure | None = Field(
        default=None,
        description="Keep the checkpoint of the best evaluation too, by this number: accuracy, sampled_accuracy, "
        "lenient_accuracy, partial_accuracy or format_accuracy. null: of the last ones alone.",
    )
    on_divergence: Literal["stop", "rollback", "ignore"] = Field(
        description="When a loss, gradient or reward is not finite or KL explodes: stop; go back to the last checkpoint "
        "and on at a tenth of the rate; or drop the batch. Such an update never reaches the weights."
    )
    max_kl: float = Field(gt=0, description="KL divergence from the reference, per token, that counts as an explosion.")
    resume: str | None = Field(description="Folder of a run to continue; its own configuration is used.")
    loggers: list[str] = Field(
        default=["tensorboard"],
        description="Where numbers go beside the run's own files: tensorboard, wandb, trackio, mlflow, or the import path "
        "of a class of your own.",
    )

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainingSection:
        if self.batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of micro_batch_size={self.micro_batch_size}; "
                f"set training.micro_batch_size to a divisor of it"
            )
        return self

    @property
    def prompts_per_step(self) -> int:
        return self.batch_size or self.micro_batch_size


VERIFIERS = "agent_tunix.environments.verifiers.Verifiers"
GENERATED = ("arithmetic", "reasoning_gym")  # sources of problems that no file holds


class DataSection(Section):
    source: Literal["arithmetic", "reasoning_gym", "verifiers", "table"] = Field(
        description="Generated problems of our own, those of reasoning-gym, tasks of verifiers, or rows of questions and "
        "answers."
    )
    path: str | None = Field(
        description="A .jsonl, .csv or .parquet file, a folder with train.* and test.* files, a repository of the hub, "
        "kaggle:<owner>/<data set>, or tfds:<name>."
    )
    subset: str | None = Field(
        description="Configuration of a hub data set, where it has several; of a folder without train.*, how the "
        "names of its files begin, as in main_train.csv."
    )
    num_examples: Positive | None = Field(
        description="Training examples (of generated ones, train_fraction of them); null: all, where there is an end."
    )
    question_field: str = Field(description="Field of a row that holds the question.")
    answer_field: str = Field(description="Field of a row that holds the answer.")
    answer_pattern: str | None = Field(
        description="Regular expression whose first group is the final answer in that field. Its time is not bounded: "
        "nested repeats, as in `(a+)+`, may take minutes for a row."
    )
    keep_pattern: str | None = Field(
        default=None,
        description="Regular expression that is found in the answer field of each row that is used, in all splits; null: "
        "all rows are. Its time is not bounded either.",
    )
    solve_rate: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = Field(
        default=None,
        description="Train only on problems that the starting policy solves at a share within [low, high] of its attempts, "
        "as in [0.01,0.99], which leaves out those that it always or never solves; null: on all.",
    )
    solve_attempts: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=8, description="Completions of each training problem from which that share is measured."
    )
    system_prompt: str = Field(description="Put before every question, as the system's message where the model has such.")
    enable_thinking: bool | None = Field(
        default=None,
        description="Whether the model is to think before it answers: a switch of the chat templates that have one, as "
        "Qwen3's. null: leave it to the template.",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        description="What a malformed row does: stop with its line number, or be counted and skipped."
    )
    task: str | None = Field(
        default=None, description="Which of reasoning-gym's generators makes the problems, or which taskset of verifiers."
    )
    level: Step | None = Field(
        default=None,
        description="Level of the problems, 0 the easiest: of that task's curriculum, or of arithmetic's numbers, which go "
        "up to 49 at level 0 and from 100 to 499 at level 1. null: as the generator is by itself.",
    )
    settings: dict[str, Any] = Field(
        default={}, description="Settings of that generator by name, as {min_terms: 3}, or of verifiers' environment."
    )
    scorer: str | None = Field(
        default=None,
        description="Import path of a function, called as a reward is, that gives 1 to a completion which solves its "
        "problem; accuracy counts those. null: the answer block must hold the answer.",
    )

    @field_validator("path")
    @classmethod
    def _is_read(cls, path: str | None, before: ValidationInfo) -> str | None:
        source = before.data.get("source")
        if path is not None and source != "table":
            raise ValueError(f"would not be read, as data={source} is generated; data=jsonl reads data of your own")
        return path

    @model_validator(mode="after")
    def _a_task_has_a_generator(self) -> DataSection:
        given = {"task": self.task, "level": self.level, "settings": self.settings or None}
        known = {"reasoning_gym": [*given], "verifiers": ["task", "settings"], "arithmetic": ["level"]}.get(self.source, [])
        if stray := [key for key, value in given.items() if value is not None and key not in known]:
            raise ValueError(f"source={self.source} has no {stray[0]}; data=reasoning_gym has")
        if self.source == "reasoning_gym" and self.task is None:
            raise ValueError("source=reasoning_gym needs a task, as in data.task=chain_sum")
        return self

    @field_validator("solve_rate")
    @classmethod
    def _has_something_within(cls, bounds: list[float] | None) -> list[float] | None:
        if bounds is not None and bounds[0] > bounds[1]:
            raise ValueError("has its low bound above its high one; give [low,high]")
        return bounds

    @field_validator("answer_pattern")
    @classmethod
    def _has_a_group(cls, pattern: str | None) -> str | None:
        if pattern is not None and _compiled(pattern).groups < 1:
            raise ValueError("has no group; put the part that is the answer in parentheses")
        return pattern

    @field_validator("keep_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            _compiled(pattern)
        return pattern


class EnvironmentSection(Section):
    """Where episodes are played; by default an answer is all that there is."""

    name: str | None = Field(
        default=None, description="Import path of the class in which episodes are played; null: one turn, the answer."
    )
    settings: dict[str, Any] = Field(default={}, description="What that class is made with, by the names of its parameters.")
    tools: list[str] = Field(default=[], description="Import paths of functions that the model may call, beside its own.")
    tool_format: Annotated[str, OneOf("agent_tunix.environments.tool_formats", "FORMATS")] | None = Field(
        default=None, description="How calls of tools are written; null: as the checkpoint's chat template has it."
    )
    max_turns: Positive = Field(default=8, description="Turns of the model in an episode; one that would go on is cut.")
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = Field(
        default=None, description="Seconds that a call of the environment may take; the episode fails then. null: no limit."
    )
    unfinished: Literal["zero", "leave"] = Field(
        default="zero",
        description="What becomes of episodes that are cut or fail: their reward is zero, or they leave their group, and "
        "nothing is learnt from them.",
    )

    @property
    def is_played(self) -> bool:
        """Whether there is more to an episode than an answer."""
        return self.name is not None or bool(self.tools)


REWARDS, EARLIER_REWARDS = "agent_tunix.environments.rewards.", r"agent_tunix\.tasks\.rewards\."


class RewardSection(Section):
    functions: dict[str, str] = Field(description="Name and import path of each reward function.")
    weights: dict[str, float] = Field(description="Weight of each function in the reward; 1 where none is given.")
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = Field(
        default=None,
        description="Seconds that a call of a function may take, calls that are awaited together counting as one; the "
        "functions then run in a process of their own. null: no limit.",
    )

    @field_validator("functions", mode="before")
    @classmethod
    def _where_they_are_now(cls, functions: Any) -> Any:
        """Runs of earlier versions name the rewards of this package where they were then."""
        if not isinstance(functions, dict):
            return functions
        now = {
            name: re.sub(rf"^{EARLIER_REWARDS}(?=\w)", REWARDS, path)
            for name, path in functions.items()
            if isinstance(path, str)
        }
        return functions | now


OF_A_GENERATOR: dict[str, Any] = {"task": None, "level": None, "settings": {}, "scorer": None}  # and what other sources have
OF_A_TABLE = ("path", "subset", "question_field", "answer_field", "answer_pattern", "keep_pattern", "on_bad_row")
SET_KEYS = ("source", *OF_A_TABLE, *OF_A_GENERATOR)


def data_of_set(data: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The data section of a further test set: the run's own, with the keys that the set gives. A path makes it a table, and
    generated problems have no path.
    """
    source = given.get("source", data.get("source") if given.get("path") is None else "table")
    path = given.get("path", data.get("path") if source == "table" else None)
    others = {} if source == data.get("source") else OF_A_GENERATOR
    return {**data, **others, **given, "source": source, "path": path}


class EvaluationSection(Section):
    num_examples: Positive = Field(description="Held-out examples an evaluation uses, at most.")
    batch_size: Positive = Field(description="Prompts evaluated at once.")
    sampled: bool = Field(description="Report accuracy at the training temperature beside greedy accuracy.")
    sets: dict[str, dict[str, Any]] = Field(
        default={},
        description="Further test sets, which a run evaluates too, greedily, and evaluate.py in the way it is asked: "
        "[gsm8k,hard.jsonl,reasoning_gym:gcd], which are files of conf/data, paths and tasks; or by name the keys in which "
        f"each differs from the run's own data, of {', '.join(SET_KEYS[:-1])} and {SET_KEYS[-1]}.",
    )

    @field_validator("sets")
    @classmethod
    def _have_names(cls, sets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if strange := [name for name in sets if not re.fullmatch(r"[\w. -]+", name)]:
            raise ValueError(f"{strange[0]!r} is no name for a set; it has letters, digits, and any of _.- and spaces")
        return sets


class Config(Section):
    """The configuration of a training run."""

    dry_run: bool = Field(description="Show what the run would do, and do not load weights or train.")
    seed: int = Input(ge=0, lt=2**31, description="Root of all randomness; the same seed gives the same run.")
    experiment_name: str | None = Input(default=None, description="What the run is called in lists, reports and loggers.")
    project_name: str | None = Input(default=None, description="What it is a part of.")
    description: str | None = Input(default=None, description="What it is for, in a sentence or two.")
    tags: list[str] = Input(default=[], description="Words by which runs are found again.")
    model: ModelSection
    optimizer: OptimizerSection
    scheduler: SchedulerSection
    grpo: GrpoSection
    generation: GenerationSection
    training: TrainingSection
    data: DataSection
    environment: EnvironmentSection = EnvironmentSection()
    reward: RewardSection
    evaluation: EvaluationSection

    @model_validator(mode="after")
    def _rewards_come_from_somewhere(self) -> Config:
        """An environment has rewards of its own, whose names are known when it has given some."""
        if self.environment.name is not None:
            return self
        if not self.reward.functions:
            raise ValueError("reward.functions names no function, and there is no environment.name to give rewards")
        if stray := sorted(set(self.reward.weights) - set(self.reward.functions)):
            raise ValueError(f"reward.weights are given for {', '.join(stray)}, which reward.functions does not name")
        return self

    @model_validator(mode="after")
    def _verifiers_plays_its_own_tasks(self) -> Config:
        """What is played and what is read are one choice: `allow_verifiers` looks at the former, which imports."""
        of_data = {"task": self.data.task, "settings": self.data.settings}
        plays, reads = self.environment.name == VERIFIERS, self.data.source == "verifiers"
        if plays != reads or (plays and self.environment.settings != of_data):
            raise ValueError(
                "data=verifiers goes with environment=verifiers, whose environment.settings are data.task and data.settings"
            )
        return self


class InferenceSection(Section):
    temperature: float = Field(ge=0, description="Divides the logits; 0 takes the likeliest token.")
    top_k: Positive | None = Field(description="Sample from the k likeliest tokens; null: from all.")
    top_p: float = Field(gt=0, le=1, description="Sample from the smallest set of tokens with this probability.")


class EvaluateConfig(Config):
    """The configuration of `evaluate.py`: a training configuration, and what to evaluate."""

    run: str | None = Field(description="Folder of a run to evaluate; null: the base model.")
    step: StepOrBest | None = Field(description="Checkpoint to evaluate; null: last; best: by accuracy; 0: before training.")
    num_passes: Positive = Field(description="Completions of a problem, for majority vote and pass@k; one if greedy.")
    inference_config: InferenceSection


class ServedConfig(Config):
    """A training configuration, or a run, whose model is asked."""

    run: str | None = Field(description="Folder of a run whose model is asked; null: the base model.")
    step: StepOrBest | None = Field(
        description="Checkpoint that is asked; null: last; best: by accuracy; 0: before training."
    )


class ServeSection(Section):
    host: str = Field(description="Address to listen at. Any other than 127.0.0.1 lets other machines ask the model.")
    port: int = Field(ge=0, le=65535, description="Port to listen at; 0: any that is free.")
    max_batch: Annotated[int, Field(ge=1, le=4096)] = Field(description="Choices that are drawn at once; others wait.")
    max_length: Length = Field(description="Tokens that a prompt and what is drawn after it may have together.")


class ServeConfig(ServedConfig):
    """The configuration of `agent-tunix serve`."""

    serve: ServeSection


class ChatConfig(ServedConfig):
    """The configuration of `agent-tunix chat`."""

    inference_config: InferenceSection
    max_length: Length = Field(description="Tokens that a conversation may have.")


class ExportConfig(Section):
    """The configuration of `agent-tunix export`."""

    run: str = Field(description="Folder of the run to export.")
    step: StepOrBest | None = Field(description="Checkpoint to export; null: the last; best: by accuracy.")
    format: Literal["peft", "merged", "gguf-ready"] = Field(
        description="A PEFT adapter; a whole model for transformers and vLLM; or one for llama.cpp's converter."
    )
    output: str | None = Field(description="New folder to write; null: exports/<format>-<step> in the run.")
    dtype: Literal["float32", "bfloat16"] = Field(
        description="Type of what is written; bfloat16 halves the files and rounds the smallest changes away."
    )
    push_to: str | None = Field(
        default=None, description="Repository of the Hugging Face hub to send it to, as owner/name; null: it stays here."
    )
    dry_run: bool = Field(default=True, description="Only show what push_to would send; false sends it.")
    private: bool = Field(default=False, description="Whether push_to makes a repository that no one else can read.")

    @model_validator(mode="after")
    def _has_somewhere_to_go(self) -> ExportConfig:
        if self.push_to is None and (self.private or not self.dry_run):
            given = "private=true" if self.private else "dry_run=false"
            raise ValueError(f"{given} is about a repository of the hub, and there is no push_to=<owner/name>")
        return self

    @field_validator("step")
    @classmethod
    def _is_of_training(cls, step: StepOrBest | None) -> StepOrBest | None:
        if step == 0:
            raise ValueError("is the model before training, of which there is nothing to export")
        return step
