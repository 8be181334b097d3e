"""What a search says, in sentences that can be checked against their numbers."""

from __future__ import annotations

from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.lab.tune import wording
from agent_tunix.lab.tune.selection import Result, Standing
from agent_tunix.lab.tune.stages import DECAY, RATE, WARMUP, Stage

WARM_UP = Stage("3-warm-up", "Warm-up ratio", WARMUP, (0.0, 0.1, 0.2), 0.1)
END, MIDDLE = Accuracy(40, 0.965, 200), Accuracy(10, 0.9, 200)
FIRST, SECOND = {RATE: 1e-5, WARMUP: 0.1, DECAY: 0.01}, {RATE: 1e-5, WARMUP: 0.1, DECAY: 0.0}


def seeds(*shares: float) -> list[Accuracy]:
    return [Accuracy(40, share, 200) for share in shares]


def test_no_difference_within_noise_is_said_plainly():
    others = [Standing(0.0, Accuracy(10, 0.89, 200), MIDDLE), Standing(0.2, Accuracy(40, 0.95, 200), END)]
    assert wording.stage_conclusion(WARM_UP, 0.1, END, others) == (
        "0.1 ends at 96.5 % (93.0 to 98.3) held-out accuracy. No difference within noise: "
        "0.2 (95.0 % against 96.5 % at 40 updates), so 0.1 is kept. "
        "Set aside before there was a difference: 0 (89.0 % against 90.0 % at 10 updates)."
    )


def test_what_fell_behind_and_what_diverged_is_named_with_its_numbers():
    others = [Standing(0.0, Accuracy(10, 0.3, 200), MIDDLE), Standing(0.1, None, MIDDLE)]
    assert wording.stage_conclusion(WARM_UP, 0.2, END, others) == (
        "0.2 ends at 96.5 % (93.0 to 98.3) held-out accuracy. "
        "Behind beyond noise: 0 (30.0 % against 90.0 % at 10 updates), 0.1 (diverged)."
    )


def test_what_was_dropped_before_the_others_diverged_is_not_said_to_have_diverged():
    first = [Result(0.0, MIDDLE), Result(0.1, MIDDLE), Result(0.2, None)]
    assert wording.all_diverged(WARM_UP, [first, [Result(0.1, None)]]) == (
        "Warm-up ratio: all that were kept diverged, 0.1, 0.2; dropped before for their accuracy: 0."
    )
    assert wording.all_diverged(WARM_UP, [[Result(0.0, None), Result(0.2, None)]]) == (
        "Every warm-up ratio that was tried diverged."
    )


def test_a_rung_lists_all_that_were_there():
    found = wording.rung(10, [Result(0.1, MIDDLE), Result(0.2, None)], {0.1: "1", 0.2: "2"}, [0.1])
    assert found["steps"] == 10
    assert [(row["job"], row["value"], row["accuracy"], row["kept"]) for row in found["jobs"]] == [
        ("1", 0.1, 0.9, True),
        ("2", 0.2, None, False),
    ]


def test_finalists_are_told_apart_or_not():
    close, far = seeds(0.95, 0.96, 0.97), seeds(0.60, 0.61, 0.62)
    said = wording.finalists_conclusion([FIRST, SECOND], [seeds(0.96, 0.96, 0.96), close], 0)
    assert "no difference within noise: learning_rate=1e-05 warmup_ratio=0.1 weight_decay=0 with 96.0 %" in said
    said = wording.finalists_conclusion([SECOND, FIRST], [far, close], 1)
    assert said.startswith("Over 3 seeds learning_rate=1e-05 warmup_ratio=0.1 weight_decay=0.01 reaches 96.0 %")
    assert "behind beyond noise: learning_rate=1e-05 warmup_ratio=0.1 weight_decay=0 with 61.0 %" in said
    rows = wording.finalists_rung(40, [SECOND, FIRST], [far, close])["jobs"]
    assert [row["jobs"] for row in rows] == [["0", "1", "2"], ["3", "4", "5"]]
    assert rows[1]["accuracies"] == [0.95, 0.96, 0.97]


def test_the_verdict_gives_settings_accuracy_and_what_to_know():
    assert wording.verdict(FIRST, seeds(0.965), 0.375, ["It was short."]) == (
        "The run with learning_rate=1e-05 warmup_ratio=0.1 weight_decay=0.01 reaches 96.5 % (93.0 to 98.3) held-out "
        "accuracy with one seed, from 37.5 % before training. It was short."
    )
