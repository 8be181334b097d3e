"""What a run is made of: everything that its configuration names, opened and checked before anything is written."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from agent_tunix.config.guidance import warnings
from agent_tunix.config.imports import OWN, Origin
from agent_tunix.config.schema import GENERATED, Config, data_of_set
from agent_tunix.engine.engine import Engine
from agent_tunix.engine.random_keys import Purpose, step_key
from agent_tunix.engine.sampler import Sampling
from agent_tunix.environments.rewards import Judge, RewardFunction, Scorer
from agent_tunix.environments.stream import Stream
from agent_tunix.environments.world import World, load_world
from agent_tunix.errors import UserError
from agent_tunix.models.base import Model
from agent_tunix.models.lora import Adapters
from agent_tunix.models.sharding import rows_to_come
from agent_tunix.training import loading
from agent_tunix.training.advisor import Advisor
from agent_tunix.training.data import Notice, Task, load_task, refuse_unknown_tokens, with_demonstrations
from agent_tunix.training.horizon import Plan, coefficients, hyperparameters, loss_form, make_plan, too_few
from agent_tunix.training.loggers.base import Guarded, Logger, logger_class
from agent_tunix.training.play import Answers, Playing
from agent_tunix.types import Batch, Prompts

SILENT = Advisor()
Way = tuple[Sampling, float]  # of answering held-out problems: how tokens are drawn, and at which temperature


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that stays the same over a run."""

    cfg: Config
    model: Model
    engine: Engine
    task: Task
    plan: Plan
    sampling: Sampling
    scorer: Scorer
    judge: Judge
    set_judges: dict[str, Judge]  # of the further test sets
    world: World | None  # None: an answer is all there is to an episode
    stream: Stream
    loggers: tuple[type[Logger], ...]
    advisor: Advisor
    overrides: tuple[str, ...]  # as they were given
    started: float  # on the monotonic clock
    first_answers: dict[str, Answers]  # of policies before their first update, for all runs of the process
    solved: dict[str, list[int]]  # how often such policies solved the training problems, for all runs of the process
    solve_rates: str = ""  # how often each problem was solved before training, as the run's folder has it

    def open_loggers(self, folder: Path, notice: Notice) -> list[Guarded]:
        return open_each(self.loggers, folder, self.cfg, notice)

    def key(self, step: int, purpose: Purpose) -> jax.Array:
        return step_key(self.cfg.seed, step, purpose)

    @property
    def playing(self) -> Playing | None:
        """How episodes are played, where there is more to one than an answer."""
        return Playing.of(self.cfg, self.world, self.model.tokenizer) if self.world else None

    def evaluation_ways(self) -> list[Way]:
        """How held-out problems are answered: greedily and, if that is asked for, as in training."""
        one = dataclasses.replace(self.sampling, num_generations=1)
        as_trained = [(one, self.cfg.generation.temperature)] if self.cfg.evaluation.sampled else []
        return [(dataclasses.replace(one, greedy=True), 1.0), *as_trained]

    def beginning(self, way: Way, name: str | None = None) -> str:
        """Equal for runs whose policies, before their first update, give the same answers to held-out problems, or to those
        of a further test set.
        """
        cfg, training = self.cfg, self.cfg.training
        begun = cfg.model, cfg.seed, training.init_from, training.init_step
        asked = cfg.data, cfg.environment, training.train_fraction, cfg.evaluation, cfg.generation, self.task.prompt_width
        return repr((begun, asked, way, name))


def open_each(loggers: Sequence[type[Logger]], folder: Path, cfg: Config, notice: Notice) -> list[Guarded]:
    """The loggers of a run, opened for its folder; what fails in them is told by `notice`."""
    return [Guarded(kind, folder, cfg.model_dump(mode="json"), notice) for kind in loggers]


class Loaded:
    """What a process has loaded: the last model, all data and rewards, answers of policies before their first update.

    The next run that needs the same finds it here. `reward_functions` are Python's own, which no path leads to.
    """

    def __init__(self, reward_functions: Mapping[str, RewardFunction] | None = None) -> None:
        self._reward_functions = reward_functions
        self._model: tuple[Any, Model] | None = None
        self._tasks: dict[str, Task] = {}
        self._scorers: dict[str, Scorer] = {}
        self.first_answers: dict[str, Answers] = {}
        self.solved: dict[str, list[int]] = {}

    def model(self, cfg: Config) -> Model:
        wanted = (cfg.model, cfg.training.init_from, cfg.training.init_step)
        if self._model is None or self._model[0] != wanted:
            self._model = None  # two sets of weights need not fit
            self._model = (wanted, loading.load_model(cfg))
        return self._model[1]

    def task(self, cfg: Config, model: Model, notice: Notice) -> Task:
        cuts = (cfg.generation.max_prompt_length, cfg.evaluation.num_examples, cfg.training.train_fraction)
        seed = cfg.seed if cfg.data.source in GENERATED else None  # files are cut the same for every seed
        wanted = repr((cfg.data, cfg.environment, seed, cuts, cfg.model.weights, cfg.evaluation.sets))
        if wanted not in self._tasks:
            task = load_task(cfg, model.tokenizer, notice)
            refuse_unknown_tokens([example.prompt_ids for example in task.all()], model.arch)
            self._tasks[wanted] = task
        return self._tasks[wanted]

    def scorer(self, cfg: Config, origin: Origin, notice: Notice) -> Scorer:
        """Jobs that differ in weights alone share the functions, and the process in which these run."""
        reward = cfg.reward
        wanted = repr((reward.functions, reward.timeout, origin))
        if wanted not in self._scorers:
            own = reward.functions, reward.weights, origin, notice, reward.timeout
            self._scorers[wanted] = Scorer(*own, self._reward_functions)
        return self._scorers[wanted].weighing(reward.weights)


def prepare(
    cfg: Config,
    loaded: Loaded,
    notice: Notice,
    overrides: Sequence[str] = (),
    origin: Origin = OWN,
    advisor: Advisor = SILENT,
) -> Setup:
    """Opens what a run needs; whatever the user must mend is found here, before anything is written."""
    started = time.monotonic()
    model = loaded.model(cfg)
    unusual = loading.unusual_adapters(cfg, model.arch)
    scorer = loaded.scorer(cfg, origin, notice)
    judge = Judge(cfg.data.scorer, origin, notice)
    scorers = {name: data_of_set(cfg.data.model_dump(), given).get("scorer") for name, given in cfg.evaluation.sets.items()}
    set_judges = {name: Judge(scorer, origin, notice) for name, scorer in scorers.items()}
    world = load_world(cfg.environment, origin, notice)
    if world is not None and (jax.process_count() > 1 or cfg.training.method == "supervised"):
        why = "several processes" if jax.process_count() > 1 else "training.method=supervised, which plays no episodes"
        raise UserError(f"environment.name={cfg.environment.name} does not go together with {why}.")
    loggers = tuple(logger_class(name, origin, notice) for name in cfg.training.loggers)
    task = loaded.task(cfg, model, notice)
    if cfg.training.method == "supervised":
        train = with_demonstrations(task.train, model.tokenizer, model.arch, cfg.generation.max_generation_steps, notice)
        task = dataclasses.replace(task, train=train)
    plan = make_plan(cfg, len(task.train))
    too_much = advisor.before(cfg, task.prompt_width)
    for line in (*unusual, *too_few(cfg, plan), *too_much, *warnings(cfg, len(task.train))):
        notice(f"warning: {line}")
    stream = Stream(task.train, cfg.training.prompts_per_step, plan.batches_per_epoch, cfg.seed)
    sampling = loading.training_sampling(cfg, model.tokenizer)
    engine = engine_of(cfg, model, loading.earlier_adapters(cfg, model))
    return Setup(
        cfg,
        model,
        engine,
        task,
        plan,
        sampling,
        scorer,
        judge,
        set_judges,
        world,
        stream,
        loggers,
        advisor,
        tuple(overrides),
        started,
        loaded.first_answers,
        loaded.solved,
    )


def engine_of(cfg: Config, model: Model, reference: Adapters | None) -> Engine:
    """The engine that serves a configuration."""
    micro_batches = cfg.training.prompts_per_step // cfg.training.micro_batch_size
    of_loss = loss_form(cfg), coefficients(cfg)
    return Engine(model, reference, micro_batches, *of_loss, cfg.optimizer.optimizer_name, cfg.training.max_kl)


def compile_ahead(r: Setup) -> None:
    """Begins to compile the programs of a run that trains adapters by GRPO on one device, before any weight is read."""
    if r.world is not None:  # the widths of whose prompts are not known
        return
    if r.cfg.training.method == "grpo" and r.cfg.model.lora_rank > 0 and r.model.mesh.size == 1:
        r.engine.compile_ahead(partial(first_calls, r))


def first_calls(r: Setup, engine: Engine) -> None:
    """Makes the calls of a run's first steps, with shapes for arrays, as if completions were as long as they can be.

    The update comes first: it takes longest to compile.
    """
    state = loading.state_shapes(r.cfg, r.model)
    policy = engine.policy(state.trainable)
    to_come, key = partial(rows_to_come, mesh=r.model.mesh), jax.eval_shape(r.key, 0, Purpose.ROLLOUT)

    def prompts(rows: int, width: int = r.task.prompt_width) -> Prompts:
        ids_PS = to_come((rows, width), jnp.int32)
        return Prompts(ids_PS, ids_PS)

    asked = prompts(r.cfg.training.prompts_per_step)
    shape = (r.cfg.training.prompts_per_step * r.sampling.num_generations, r.sampling.max_steps)
    numbers_BC, numbers_B = to_come(shape, jnp.float32), to_come(shape[:1], jnp.float32)
    tokens_BC, mask_BC = to_come(shape, jnp.int32), to_come(shape, bool)
    drawn = Batch(asked, tokens_BC, mask_BC, mask_BC, numbers_BC)
    corrected, compared = r.cfg.grpo.importance_correction != "none", r.cfg.grpo.beta > 0
    learnt = dataclasses.replace(
        drawn,
        trainer_logprobs_BC=numbers_BC if corrected else None,
        reference_logprobs_BC=numbers_BC if compared else None,
        weights_BC=numbers_BC,
        advantages_B=numbers_B,
    )
    engine.update(state, learnt, hyperparameters(r.cfg, r.plan, 1))
    held_out = prompts(min(r.cfg.evaluation.batch_size, len(r.task.validation)))
    for way in r.evaluation_ways():
        engine.sample(policy, held_out, key, *way, shared=r.beginning(way))
    greedy = r.evaluation_ways()[0]
    for name, examples in r.task.sets.items():
        of_set = prompts(min(r.cfg.evaluation.batch_size, len(examples)), r.task.width_of(name))
        engine.sample(policy, of_set, key, *greedy, shared=r.beginning(greedy, name))
    engine.sample(policy, asked, key, r.sampling, r.cfg.generation.temperature)
    if corrected:
        engine.policy_logprobs(policy, drawn)
    if compared:
        engine.reference_logprobs(drawn)
    for way in r.evaluation_ways():
        engine.sample(policy, held_out, key, *way)
