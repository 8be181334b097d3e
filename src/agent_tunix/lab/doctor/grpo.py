"""Illnesses of learning from rewards: no signal in them, the wrong signal, or a policy that has run away from its start."""

from __future__ import annotations

import math
import statistics
from typing import Any

from agent_tunix.algorithm.objectives import OBJECTIVES, token_ratio
from agent_tunix.config.commands import value_text
from agent_tunix.environments.arithmetic import how_many
from agent_tunix.lab.doctor.finding import Finding, Severity, unless
from agent_tunix.lab.doctor.records import RunRecords, difference, late, trend
from agent_tunix.lab.doctor.remedies import lower_rate, rerun, rounded, scaled_rate
from agent_tunix.lab.doctor.signs import (
    CERTAIN,
    SURE,
    best_success,
    fall_below_start,
    learnt,
    progress,
    reward_rose,
    success,
)

NO_SIGNAL = 0.9  # share of groups without variance; a run that is learning has less than half of them until it is done
MANY_IDLE = 0.7  # share of groups without variance that is worth a word where hardly any completion is right
HARDLY_RIGHT = 0.1  # accuracy below which they are so because their completions are all wrong
NEVER_RIGHT = 0.02  # accuracy up to which it must first be shown how
MANY_GENERATIONS = 16  # completions of a prompt beyond which more cost a lot, and a start that is shown how costs less
CUT = 0.5  # share of completions cut at the limit: more are cut than are judged
SOME_CUT = 0.2  # share worth a word
NEARLY_ALL_CUT = 0.9  # share at which twice the room would hardly do
WELL_FORMED = 0.85  # share at which the format counts as learnt
SOLVED = 0.8  # accuracy above which groups agree because they are right, and format is not all that was learnt
HALF = 0.5  # accuracy above which a run that learnt may have stopped exploring without harm
ENTROPY_GONE = 0.02  # nats a token; the demo, solved, ends above it
ENTROPY_LEFT = 0.1  # share of the early entropy
NOISE = 0.6  # share of the entropy of blind guessing; a model that knows its language is far below a third
KL_RUNAWAY = 0.5  # nats a token; runs that learn end between 0.01 and 0.2
MISMATCH = 1e-2  # nats a token between sampler and trainer; float32 gives 1e-13, bfloat16 2e-4
CLIPPED = 0.1  # share of tokens whose gradient the ratio clip removes; a few percent is usual
CLIPPED_WHOLE = 0.5  # where whole sequences have one ratio: clipping many of them is how such objectives work
DISCARDED = 0.75  # share of the groups drawn that are thrown away
ANSWERS = ("answer_correct", "number_in_answer")  # our reward functions that look at the answer
DEFAULT_BETA = 0.08


def too_hard(run: RunRecords) -> Finding | None:
    """Most groups have no spread because their completions are all wrong; not because nothing is paid or drawn."""
    idle, right = run.values("groups/zero_variance"), success(run)
    if not idle or statistics.median(idle) < MANY_IDLE or right is None or right >= HARDLY_RIGHT:
        return None
    if not any(weights(run).values()) or _nearly_greedy(run):
        return None
    first, *later = _for_the_hard(run, right)
    evidence = (
        f"{statistics.fmean(idle):.0%} of the groups over {len(idle)} batches had no variance in their rewards, as hardly "
        f"any completion is right: held-out accuracy {right:.1%}"
    )
    if "training.method" in first:
        evidence += "; what a supervised run has learnt is gone on from by training.init_from"
    elif later:
        others = [", ".join(f"{key}={value_text(value)}" for key, value in changes.items()) for changes in later]
        evidence += f"; what else helps, in this order: {'; '.join(others)}"
    return Finding("task too hard", unless(learnt(run)), evidence, rerun(run, first))


def _for_the_hard(run: RunRecords, right: float) -> list[dict[str, Any]]:
    """What may be changed where hardly any completion is right, what helps most and costs least first.

    Where next to none is, there are no problems to choose, and the order is the other way round.
    """
    generations, chosen = int(run.number("grpo.num_generations", 4)), run.setting("data.solve_rate") is not None
    # Worked answers are not chosen by how often problems are solved.
    shown = {"training.method": "supervised", **({"data.solve_rate": None} if chosen else {})}
    found: list[dict[str, Any]] = []
    if not chosen:
        found.append({"data.solve_rate": [0.05, 0.95]})
    if not run.number("grpo.resample_rounds", 0):
        found.append({"grpo.resample_rounds": 2})
    if generations < MANY_GENERATIONS or not _has_worked_answers(run):
        found.append({"grpo.num_generations": 2 * generations})
    if _has_worked_answers(run):
        found.append(shown)
    return found[::-1] if right <= NEVER_RIGHT else found


def no_signal(run: RunRecords) -> Finding | None:
    """Groups whose completions all got the same reward have no advantage and teach nothing."""
    idle = run.values("groups/zero_variance")
    if not idle or statistics.median(idle) < NO_SIGNAL or too_hard(run):
        return None
    rewards = run.values("reward/mean")
    evidence = (
        f"{statistics.fmean(idle):.0%} of the groups over {len(idle)} batches had no variance in their rewards "
        f"(mean reward {statistics.fmean(rewards or [0.0]):.3g}): there is nothing to compare"
    )
    solved = (success(run) or 0.0) >= SOLVED
    if solved:
        evidence += f"; {success(run):.0%} are solved already, the task is too easy"
    return Finding("no signal", unless(solved), evidence, _some_signal(run))


def _some_signal(run: RunRecords) -> str:
    """The command that lets completions of one prompt differ in reward."""
    if not any(weights(run).values()):
        return rerun(run, {}, without=["reward.weights"])
    if _nearly_greedy(run):
        return rerun(run, {"generation.temperature": 1.0, "generation.top_k": None, "generation.top_p": 1.0})
    if (success(run) or 0.0) > NEVER_RIGHT or not _has_worked_answers(run):
        return rerun(run, {"grpo.num_generations": int(2 * run.number("grpo.num_generations", 4))})
    return rerun(run, {"training.method": "supervised"})  # never right: it must first be shown how


def _has_worked_answers(run: RunRecords) -> bool:
    return run.setting("data.source") == "arithmetic" or run.setting("data.answer_pattern") is not None


def _nearly_greedy(run: RunRecords) -> bool:
    """Whether completions of a prompt are alike because of how they are drawn."""
    return run.number("generation.temperature", 1.0) < 0.5 or _few_tokens(run)


def _few_tokens(run: RunRecords) -> bool:
    return run.number("generation.top_k", 50) < 3 or run.number("generation.top_p", 1.0) < 0.5


def discarded(run: RunRecords) -> Finding | None:
    """Dynamic sampling draws much to learn from little."""
    thrown, prompts = (
        run.values("groups/discarded"),
        run.number("training.batch_size", 0) or run.number("training.micro_batch_size", 0),
    )
    if len(thrown) < 3 or not prompts:
        return None
    share = statistics.median(thrown) / (statistics.median(thrown) + prompts)
    if share < DISCARDED:
        return None
    evidence = (
        f"{share:.0%} of the groups drawn had no variance in their rewards and were thrown away "
        f"(grpo.resample_rounds={run.setting('grpo.resample_rounds')}): most of the time goes into them"
    )
    return Finding("most groups thrown away", unless(learnt(run)), evidence, _some_signal(run))


def never_positive(run: RunRecords) -> Finding | None:
    """No batch with a mean reward above zero: what is wanted never happens, or is never paid."""
    rewards = run.values("reward/mean")
    if len(rewards) < 3 or max(rewards) > 0:
        return None
    evidence = f"the mean reward of all {len(rewards)} batches was between {min(rewards):.3g} and {max(rewards):.3g}"
    negative = [name for name in weights(run) if max(run.values(f"reward/{name}"), default=0.0) < 0]
    if negative:
        evidence += f"; {', '.join(negative)} paid less than nothing every time, so that doing less is worth more"
        remedy = rerun(run, {f"reward.weights.{name}": 0.0 for name in negative}, without=["reward.weights"])
    else:
        remedy = _some_signal(run)
    return Finding("rewards never positive", unless(learnt(run) and fall_below_start(run) is None), evidence, remedy)


def truncated(run: RunRecords) -> Finding | None:
    """Completions cut at the limit get no answer, no end token, and no fair reward."""
    cut = late(run.values("completion/truncated"))
    if cut is None or cut < SOME_CUT:
        return None
    limit = int(run.number("generation.max_generation_steps", 512))
    evidence = f"{cut:.0%} of the last completions were cut at generation.max_generation_steps={limit}"
    remedy = rerun(run, {"generation.max_generation_steps": (4 if cut > NEARLY_ALL_CUT else 2) * limit})
    return Finding("answers truncated", unless(cut < CUT or learnt(run)), evidence, remedy)


def format_only(run: RunRecords) -> Finding | None:
    """Tags became right, answers did not."""
    form, seen = _format(run), run.accuracies()
    if form is None or len(seen) < 2 or form[1] < WELL_FORMED or form[1] - form[0] < 0.05:
        return None
    change = difference(seen[0], seen[-1])
    if change.z >= SURE or seen[-1].share >= SOLVED:
        return None
    evidence = f"well-formed completions {form[0]:.0%} -> {form[1]:.0%}, but held-out accuracy {seen[0]} -> {seen[-1]}"
    paid = {name: weight for name, weight in weights(run).items() if name in answer_functions(run)}
    if paid:
        dearest = max(1.0, rounded(3 * max(paid.values())))
        remedy = rerun(run, {f"reward.weights.{max(paid, key=lambda name: paid[name])}": dearest})
    else:
        remedy = rerun(run, {}, without=["reward."])
    return Finding("format learnt but not arithmetic", Severity.SERIOUS, evidence, remedy)


def _format(run: RunRecords) -> tuple[float, float] | None:
    """Early and late share of well-formed completions: as sampled in training, else as evaluated."""
    sampled = trend(run.values("reward/format_exact"))
    if sampled is not None:
        return (sampled.early, sampled.late) if sampled.z >= CERTAIN else None
    seen = run.accuracies("format_accuracy")
    return (seen[0].share, seen[-1].share) if len(seen) > 1 else None


def entropy_collapse(run: RunRecords) -> Finding | None:
    """The policy says one thing only, before that thing is right."""
    entropy, idle = run.values("entropy"), late(run.values("groups/zero_variance"))
    end = late(entropy)
    if end is None or idle is None or len(entropy) < 3 or idle < 0.7 or best_success(run) >= SOLVED:
        return None
    if end >= ENTROPY_GONE and end >= ENTROPY_LEFT * entropy[0]:
        return None
    evidence = f"entropy {entropy[0]:.2g} -> {end:.2g} nats a token, {idle:.0%} of the last groups without variance"
    if run.number("generation.temperature", 1.0) < 0.9 or _few_tokens(run):
        changes: dict[str, Any] = {"generation.temperature": 1.0, "generation.top_k": None, "generation.top_p": 1.0}
    else:
        changes = {**scaled_rate(run, 1 / 3), "grpo.beta": more_beta(run)}
    severity = unless(learnt(run) and best_success(run) >= HALF)
    return Finding("entropy collapse", severity, f"{evidence}; {progress(run)}", rerun(run, changes))


def blind(run: RunRecords) -> Finding | None:
    """Completions that are close to noise: too hot, or weights that never learnt a language."""
    entropy, vocabulary = run.values("entropy"), run.number("model.architecture.vocab_size", 0)
    if not entropy or vocabulary < 2 or entropy[0] < NOISE * math.log(vocabulary):
        return None
    hot = run.number("generation.temperature", 1.0) > 1.2
    temperature = f"generation.temperature={run.setting('generation.temperature')}"
    cause = temperature if hot else "the weights are not a trained model's"
    evidence = f"entropy {entropy[0]:.3g} of at most {math.log(vocabulary):.3g} nats a token from the start: {cause}"
    elsewhere = ["model.weights", "model.adapter", "training.init_from"]
    remedy = rerun(run, {"generation.temperature": 1.0}) if hot else rerun(run, {}, without=elsewhere)
    return Finding("completions are noise", unless(learnt(run)), evidence, remedy)


def kl_runaway(run: RunRecords) -> Finding | None:
    """The policy has gone so far from its start that what it knew is not kept."""
    kl, beta = late(run.values("kl")), run.number("grpo.beta", DEFAULT_BETA)
    changes = {**lower_rate(run), "grpo.beta": more_beta(run)}
    if kl and kl >= KL_RUNAWAY:
        evidence = f"kl {kl:.2g} nats a token over the last third, with grpo.beta={beta:g}"
        return Finding("KL runaway", unless(learnt(run)), evidence, rerun(run, changes))
    if beta == 0 and not run.supervised and fall_below_start(run) is not None and not reward_rose(run):
        evidence = "grpo.beta=0: nothing holds the policy to its start, and kl is not measured; accuracy shows that it left"
        return Finding("KL runaway", Severity.SERIOUS, evidence, rerun(run, changes))
    return None


def wrong_reward(run: RunRecords) -> Finding | None:
    """The reward rises while accuracy falls: the policy learns what is paid, which is not what is wanted."""
    fall = fall_below_start(run)
    against = any(weights(run)[name] < 0 for name in answer_functions(run))
    if fall is None or not (against or reward_rose(run)):
        return None
    changes = {n: c for n in weights(run) if (c := trend(run.values(f"reward/{n}"))) and weights(run)[n]}
    risen = [n for n, change in changes.items() if change.gain * weights(run)[n] > 0 and n not in answer_functions(run)]
    if risen:
        why, remedy = f"what rose is {', '.join(risen)}", {f"reward.weights.{n}": 0.0 for n in risen}
    elif against:
        why, remedy = "an answer that is right is paid less than a wrong one", {}
    else:
        why, remedy = "no function rose that does not look at the answer: it learns its problems by heart", lower_rate(run)
    evidence = f"{progress(run)}; held-out {fall}; {why}"
    paid_anew = ["reward.weights"] if risen or against else []
    return Finding("reward against accuracy", Severity.GRAVE, evidence, rerun(run, remedy, without=paid_anew))


def overfitting(run: RunRecords) -> Finding | None:
    """Right on what it trains on, not on what is held out."""
    trained = next((t for n in answer_functions(run) if (t := trend(run.values(f"reward/{n}")))), None)
    seen = run.accuracies("sampled_accuracy") or run.accuracies()
    if trained is None or len(seen) < 2 or trained.z < CERTAIN:
        return None
    noise = difference(seen[0], seen[-1])
    gap, gap_before = trained.late - seen[-1].share, trained.early - seen[0].share
    if gap - max(0.0, gap_before) < max(0.2, CERTAIN * noise.error):
        return None
    evidence = f"right answers in training {trained.early:.0%} -> {trained.late:.0%}, held out {seen[0]} -> {seen[-1]}"
    decay = max(0.05, 2 * run.number("optimizer.weight_decay", 0.0))
    generated, problems = run.setting("data.source") == "arithmetic", int(run.number("data.num_examples", 0))
    there = how_many("train", int(run.number("data.level", 0))) if generated else 0
    examples = max(problems, min(max(4096, 2 * problems), there)) if generated else None
    changes = {"optimizer.weight_decay": decay, "training.num_epochs": 1, "data.num_examples": examples}
    return Finding("overfitting", Severity.SERIOUS, evidence, rerun(run, changes))


def mismatch(run: RunRecords) -> Finding | None:
    """Sampler and trainer disagree about the policy, so that updates correct for what was not sampled."""
    kl = late([abs(value) for value in run.values("mismatch/kl")])
    if kl is None or kl < MISMATCH:
        return None
    evidence = f"mismatch/kl {kl:.2g} nats a token between what sampled and what is trained (bfloat16 alone gives 2e-4)"
    return Finding("sampler/trainer mismatch", unless(learnt(run)), evidence, _more_precisely(run))


def _more_precisely(run: RunRecords) -> str:
    """The command that brings sampler and trainer closer: float32, with products that a GPU or TPU does not shorten."""
    if run.setting("model.dtype") != "float32":
        return rerun(run, {"model.dtype": "float32"})
    return f"JAX_DEFAULT_MATMUL_PRECISION=highest {rerun(run, {})}"


def clipped_ratios(run: RunRecords) -> Finding | None:
    """The policy moves so far within one batch that most of its updates are cut off."""
    later = [share for share in run.values("clip_fraction") if share > 0]  # a batch's first update seldom is clipped
    iterations, objective = run.iterations, OBJECTIVES.get(str(run.setting("grpo.objective")), OBJECTIVES["grpo"])
    whole, epsilon = objective.ratio is not token_ratio, run.number("grpo.epsilon", 0.2)
    usual = CLIPPED_WHOLE if whole else CLIPPED
    if len(later) < 3 or len(later) < run.steps * (iterations - 1) / iterations / 2 or statistics.median(later) < usual:
        return None
    high = run.setting("grpo.epsilon_high")
    bounds = f"grpo.epsilon={epsilon:g}" + (f", grpo.epsilon_high={high}" if high is not None else "")
    evidence = (
        f"the ratio clip cut {statistics.median(later):.0%} of the tokens in {len(later)} of {run.steps} updates "
        f"({bounds}, grpo.num_iterations={iterations})"
    )
    if whole:
        wider = {"grpo.epsilon": rounded(3 * epsilon)}
        remedy = rerun(
            run, wider if high is None else wider | {"grpo.epsilon_high": rounded(3 * run.number("grpo.epsilon_high", 0.2))}
        )
    elif epsilon < 0.1:
        remedy = rerun(run, {"grpo.epsilon": 0.2})
    elif iterations > 1:
        remedy = rerun(run, {"grpo.num_iterations": 1})
    else:
        evidence += "; as a batch has one update alone, sampler and trainer disagree"
        remedy = _more_precisely(run)
    return Finding("clipping on every step", unless(learnt(run)), evidence, remedy)


def control(run: RunRecords) -> Finding | None:
    """A run that is made to learn nothing."""
    if run.setting("grpo.shuffle_advantages") is not True:
        return None
    evidence = f"grpo.shuffle_advantages=true: this run is a control and must not learn; {progress(run)}"
    return Finding("a control", Severity.MILD, evidence, rerun(run, {"grpo.shuffle_advantages": False}))


def weights(run: RunRecords) -> dict[str, float]:
    """Every reward function's weight."""
    functions = run.setting("reward.functions")
    names = [str(name) for name in functions] if isinstance(functions, dict) else []
    return {name: run.number(f"reward.weights.{name}", 1.0) for name in names}


def answer_functions(run: RunRecords) -> list[str]:
    """The reward functions of ours that look at the answer, by the names this run gave them."""
    return [name for name in weights(run) if str(run.setting(f"reward.functions.{name}")).rpartition(".")[2] in ANSWERS]


def more_beta(run: RunRecords) -> float:
    return max(DEFAULT_BETA, rounded(2 * run.number("grpo.beta", 0.0)))
