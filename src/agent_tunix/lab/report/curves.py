"""The curves of a run, and the same curves of several runs laid over each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agent_tunix.lab.doctor.records import RunRecords
from agent_tunix.lab.report.chart import Chart, Colour, Mark, Point, Series, hue
from agent_tunix.training.run_folder import finite

NOT_FINITE = 20  # crosses in one chart: a run that goes on after them would be covered
ACCURACIES = (
    ("accuracy", "greedy", "the likeliest completion of each problem"),
    ("sampled_accuracy", "sampled", "one completion drawn as in training"),
    ("format_accuracy", "well formed", "right or wrong"),
)
ACCURACY_NOTE = (
    "Problems solved that were not trained on, of {n}. Bars are 95 % intervals: what lies within them may be noise."
)


@dataclasses.dataclass(frozen=True)
class Measure:
    """A metric that gets a chart."""

    key: str
    title: str
    note: str
    log: bool = False  # values of several sizes: a logarithmic axis is offered


REWARD = Measure(
    "reward/mean", "Reward", "Weighted sum of the reward functions, mean over a batch. This is what training raises."
)
LOSS = Measure("loss", "Loss", "Of worked answers, in nats a token. This is what supervised training lowers.")
MEASURES = (
    Measure("kl", "KL divergence", "How far the policy has moved from where it started, in nats a token.", log=True),
    Measure("grad_norm", "Gradient norm", "Before clipping.", log=True),
    Measure("lr", "Learning rate", "As the schedule and the guard set it.", log=True),
    Measure("entropy", "Entropy", "How undecided the policy is, in nats a token. Near zero it explores no more."),
    Measure("groups/discarded", "Groups thrown away", "Drawn, and without a difference in their rewards to learn from."),
    Measure("episode/calling", "Episodes that call a tool", "Share of a batch's episodes."),
    Measure("completion/length", "Length of completions", "Mean over a batch, in tokens."),
)


def run_charts(run: RunRecords) -> list[Chart]:
    """All charts of one run; those without a single value are left out."""
    charts = [_accuracy_of(run), _loss_or_rewards(run)]
    for measure in MEASURES:
        series = [Series(measure.key, measure.title, _measured(run, measure), hue(0))]
        charts.append(_chart(measure, series, [run], _crosses(run, measure)))
    marks = _rollbacks(run)
    return [dataclasses.replace(chart, marks=marks) for chart in charts if _shows(chart)]


@dataclasses.dataclass(frozen=True)
class Line:
    """A run among others, as it is drawn in every chart."""

    id: str
    label: str
    colour: Colour
    dash: int
    run: RunRecords

    def through(self, points: Sequence[Sequence[float]]) -> Series:
        return Series(self.id, self.label, points, self.colour, self.dash)


def overlaid_charts(lines: Sequence[Line]) -> list[Chart]:
    """The charts of a run, with one line for each of several."""
    records = [line.run for line in lines]
    n = max((seen[-1].n for run in records if (seen := run.accuracies())), default=0)
    evals = [line.through(_intervals(line.run, "accuracy")) for line in lines]
    charts = [Chart("accuracy", "Held-out accuracy", ACCURACY_NOTE.format(n=n), evals, percent=True)]
    keys = _function_keys(records)
    functions = [Measure(key, f"Reward: {_function(key)}", _weight_note(records, key)) for key in keys]
    supervised = all(run.supervised for run in records)
    for measure in (LOSS, *MEASURES) if supervised else (REWARD, *functions, *MEASURES):
        series = [line.through(_measured(line.run, measure)) for line in lines]
        chart = _chart(measure, series, records, [])
        charts.append(dataclasses.replace(chart, log_y=measure.key in ("kl", "lr")))  # candidates lie powers of ten apart
    return [chart for chart in charts if _shows(chart)]


def _accuracy_of(run: RunRecords) -> Chart:
    series = [
        Series(key, f"{name}: {what}", _intervals(run, key), hue(i), dash=int(i == 2))
        for i, (key, name, what) in enumerate(ACCURACIES)
        if run.accuracies(key)
    ]
    n = max((one.n for one in run.accuracies()), default=0)
    return Chart("accuracy", "Held-out accuracy", ACCURACY_NOTE.format(n=n), series, percent=True)


def _loss_or_rewards(run: RunRecords) -> Chart:
    if run.supervised:
        return _chart(LOSS, [Series(LOSS.key, LOSS.title, run.series(LOSS.key), hue(0))], [run], _crosses(run, LOSS))
    series = [Series(REWARD.key, "reward, the weighted sum", run.series(REWARD.key), hue(0))]
    for i, key in enumerate(_function_keys([run]), start=1):
        weight = _weight(run, key)
        series.append(Series(key, f"{_function(key)}, weight {weight:g}", run.series(key), hue(i), dash=int(weight == 0)))
    note = (
        "Mean over a batch of each function, and their weighted sum, which training raises. Dashed: watched, not trained on."
    )
    return Chart("reward", "Reward by function", note, series, crosses=_crosses(run, REWARD), noisy=True)


def _measured(run: RunRecords, measure: Measure) -> Sequence[Point]:
    return run.series(measure.key) if measure.key != "kl" or run.measures_kl else ()


def _chart(measure: Measure, series: Sequence[Series], runs: Sequence[RunRecords], crosses: Sequence[Mark]) -> Chart:
    levels: list[Mark] = []
    note = measure.note
    limits = {run.setting("optimizer.max_grad_norm") for run in runs if finite(run.setting("optimizer.max_grad_norm"))}
    if measure.key == "grad_norm" and len(limits) == 1:
        limit = float(limits.pop())
        levels = [Mark(limit, f"max_grad_norm {limit:g}")]
        note += " What is above the dashed line is scaled down to it."
    return Chart(
        measure.key,
        measure.title,
        note,
        series,
        levels=levels,
        crosses=crosses,
        log_y_switch=measure.log,
        noisy=measure.key != "lr",
    )


def _shows(chart: Chart) -> bool:
    return bool(chart.crosses) or any(series.points for series in chart.series)


def _intervals(run: RunRecords, key: str) -> list[Sequence[float]]:
    return [(one.step, one.share, *one.interval) for one in run.accuracies(key)]


def _function_keys(runs: Sequence[RunRecords]) -> list[str]:
    keys = {key for run in runs for record in run.metrics for key in record if key.startswith("reward/")}
    return sorted(keys - {"reward/mean", "reward/std"})


def _function(key: str) -> str:
    return key.removeprefix("reward/")


def _weight(run: RunRecords, key: str) -> float:
    """Of a function in the reward; 1 where none is given."""
    return run.number(f"reward.weights.{_function(key)}", 1.0)


def _weight_note(runs: Sequence[RunRecords], key: str) -> str:
    """Candidates may differ in it."""
    weights = sorted({_weight(run, key) for run in runs})
    trained = f"Weight {', '.join(f'{weight:g}' for weight in weights)} in the reward."
    return f"{trained if any(weights) else 'Watched, not trained on.'} Mean over a batch."


def _crosses(run: RunRecords, measure: Measure) -> list[Mark]:
    """Steps at which a number was not finite: it is written as null."""
    steps = [r["step"] for r in run.metrics if finite(r.get("step")) and measure.key in r and not finite(r[measure.key])]
    return [Mark(step, f"{measure.title} is not finite") for step in steps[:NOT_FINITE]]


def _rollbacks(run: RunRecords) -> list[Mark]:
    events = run.summary.get("rollbacks")
    events = events if isinstance(events, list) else []
    return [Mark(e["step"], "rolled back") for e in events if isinstance(e, dict) and finite(e.get("step"))]
