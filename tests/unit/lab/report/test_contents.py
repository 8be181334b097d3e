"""What a page holds for each kind of folder, whole, half written or mangled."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agent_tunix.errors import UserError
from agent_tunix.lab.report.contents import contents, kind_of
from agent_tunix.lab.report.page import render


def charts(page: dict, section: int = 0) -> dict[str, dict]:
    return {chart["id"]: chart for chart in page["sections"][section]["charts"]}


def write_sweep(write_run, folder, **jobs):
    for name, keys in jobs.items():
        write_run(folder / name.removeprefix("job"), **keys)
    return folder


@pytest.fixture
def sweep(write_run, tmp_path):
    """Four rates: one is best, one as good but for noise, one diverged, one is still at work."""
    return write_sweep(
        write_run,
        tmp_path / "sweep",
        job0={"optimizer__learning_rate": 1e-6, "accuracies": (0.4, 0.9)},
        job1={"optimizer__learning_rate": 1e-5, "accuracies": (0.4, 0.92)},
        job2={"optimizer__learning_rate": 1e-4, "accuracies": (0.4, 0.2), "status": "diverged"},
        job10={"optimizer__learning_rate": 1e-7, "accuracies": (0.4, 0.45), "status": None},
    )


def test_a_run(write_run, tmp_path):
    page = contents(write_run(tmp_path / "run"))
    assert page["kind"] == "run"
    assert page["verdict"]["lead"] == "Healthy"
    assert list(charts(page)) == ["accuracy", "reward", "kl", "grad_norm", "lr", "entropy"]
    assert [series["id"] for series in charts(page)["reward"]["series"]] == [
        "reward/mean",
        "reward/answer",
        "reward/format_exact",
    ]
    assert charts(page)["kl"]["series"][0]["points"][9] == [10, 0.02]
    assert charts(page)["accuracy"]["series"][0]["points"][0][:2] == [0, 0.4]
    assert charts(page)["grad_norm"]["levels"] == [{"at": 0.1, "name": "max_grad_norm 0.1"}]
    assert [column["step"] for column in page["sections"][0]["samples"][0]["columns"]] == [1, 7, 13, 18, 24]


def test_further_test_sets_have_a_table_and_no_curve(write_run, tmp_path):
    folder = write_run(tmp_path / "run")
    before = contents(folder)
    assert before["sets"] == []
    on = [
        {"step": step, "split": "test", "set": "hard", "n": 50, "accuracy": share} for step, share in ((0, 0.1), (24, 0.3))
    ]
    by_hand = {"step": 24, "split": "test", "set": "hard", "n": 9, "accuracy": 1.0, "num_passes": 1}
    with open(folder / "evals.jsonl", "a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in (*on, by_hand)))
    after = contents(folder)
    assert after.pop("sets") == [
        [
            "hard",
            "10.0 % (95 % interval 4.3 to 21.4 %) (update 0)",
            "30.0 % (95 % interval 19.1 to 43.8 %) (update 24)",
            "50",
        ],
    ]
    assert after == {key: value for key, value in before.items() if key != "sets"}


def test_what_is_not_finite_is_a_cross_and_no_point(write_run, tmp_path):
    folder = write_run(tmp_path / "run", steps=3, status="diverged")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "kl": null, "lr": 1e-5, "loss": NaN}\n')
    kl = charts(contents(folder))["kl"]
    assert kl["crosses"] == [{"at": 4, "name": "KL divergence is not finite"}]
    assert [point[0] for point in kl["series"][0]["points"]] == [1, 2, 3]


def test_a_supervised_run_shows_its_loss_and_no_rewards(write_run, tmp_path):
    shown = charts(contents(write_run(tmp_path / "run", training__method="supervised")))
    assert "loss" in shown
    assert "reward" not in shown


@pytest.mark.parametrize("settings", [{"training__method": "supervised"}, {"grpo__beta": 0.0}])
def test_a_kl_that_was_not_measured_is_not_shown_as_none(write_run, tmp_path, settings):
    for name in "01":
        write_run(tmp_path / name, **settings)
    page, sweep = contents(tmp_path / "0"), contents(tmp_path)
    assert "kl" not in charts(page)
    assert "kl at the end" not in page["vitals"]
    assert "kl" not in charts(sweep)
    table = sweep["sections"][0]["table"]
    assert {row["cells"][table["heads"].index("KL")][0] for row in table["rows"]} == {"-"}


def test_rewards_of_several_updates_from_one_batch_are_shown_once(write_run, tmp_path):
    shown = charts(contents(write_run(tmp_path / "run", grpo__num_iterations=4)))
    assert len(shown["reward"]["series"][0]["points"]) == 6
    assert len(shown["kl"]["series"][0]["points"]) == 24


def test_a_sweep_lays_its_candidates_over_each_other(sweep):
    page = contents(sweep)
    assert page["verdict"]["lead"] == "Best of 4 so far: learning_rate=1e-05"
    assert "Noise does not tell it from learning_rate=1e-06" in page["verdict"]["text"]
    section = page["sections"][0]
    assert [row["id"] for row in section["table"]["rows"]] == ["0", "1", "2", "10"]
    assert [row["rank"] for row in section["table"]["rows"]] == ["tied", "best", "", ""]
    assert [series["id"] for series in charts(page)["kl"]["series"]] == ["0", "1", "2", "10"]
    colours = [tuple(entry["colour"]) for entry in section["legend"]]
    assert len(set(colours)) == 4
    assert {finding["candidate"] for finding in page["findings"]} >= {"learning_rate=0.0001"}


def test_accuracy_is_drawn_over_the_swept_rate_with_its_interval(sweep):
    chart = charts(contents(sweep))["over-values"]
    assert chart["log_x"]
    assert chart["x_label"] == "optimizer.learning_rate"
    points = chart["series"][0]["points"]
    assert [point[0] for point in points] == [1e-7, 1e-6, 1e-5]
    assert all(low < share < high for _, share, low, high in points)
    assert chart["series"][0]["hollow"] == [1e-7], "the one that has not ended"
    assert chart["crosses"] == [{"at": 1e-4, "name": "learning_rate=0.0001: diverged"}]
    assert chart["levels"] == [{"at": 0.4, "name": "before training"}]


def test_a_candidate_that_was_rolled_back_is_marked_and_not_ranked(sweep):
    (sweep / "1" / "summary.json").write_text(json.dumps({"status": "completed", "steps": 24, "rollbacks": [{"step": 9}]}))
    page = contents(sweep)
    assert page["verdict"]["lead"] == "Best of 4 so far: learning_rate=1e-06"
    assert {"at": 1e-5, "name": "learning_rate=1e-05: rolled back"} in charts(page)["over-values"]["crosses"]
    assert page["sections"][0]["table"]["rows"][1]["cells"][-1][0].startswith("rolled back")


def test_names_are_swept_over_as_well_as_numbers(write_run, tmp_path):
    jobs = {f"job{i}": {"scheduler__scheduler_name": name} for i, name in enumerate(("linear", "constant"))}
    chart = charts(contents(write_sweep(write_run, tmp_path / "sweep", **jobs)))["over-values"]
    assert chart["categories"] == ["linear", "constant"]
    assert not chart["log_x_switch"]


def test_tiles_show_texts_as_they_are_without_the_quotes_of_a_command_line(write_run, tmp_path):
    run = write_run(tmp_path / "run", model__model_size="270m", data__path="my data.jsonl")
    tiles = {name: value for name, value, _ in contents(run)["tiles"]}
    assert (tiles["model"], tiles["data"]) == ("gemma3 270m", "my data.jsonl")


def test_only_what_all_candidates_have_stands_above_them(write_run, tmp_path):
    jobs = {f"job{i}": {"data__path": f"{i}.jsonl", "model__model_size": "tiny"} for i in range(2)}
    names = [name for name, _, _ in contents(write_sweep(write_run, tmp_path / "sweep", **jobs))["tiles"]]
    assert "model" in names
    assert "data" not in names


def test_a_candidate_that_failed_says_by_what(sweep):
    fault = "ValueError: my_reward returned None"
    (sweep / "2" / "summary.json").write_text(json.dumps({"status": "failed", "steps": 24, "fault": fault}))
    rows = {row["id"]: row for row in contents(sweep)["sections"][0]["table"]["rows"]}
    assert rows["2"]["cells"][-1][0].startswith(f"failed: {fault}")


def test_numbers_that_a_search_drew_are_told_in_few_digits(write_run, tmp_path):
    jobs = {f"job{i}": {"optimizer__learning_rate": rate} for i, rate in enumerate((0.0006021147778801156, 1e-5))}
    legend = contents(write_sweep(write_run, tmp_path / "sweep", **jobs))["sections"][0]["legend"]
    assert [entry["name"] for entry in legend] == ["learning_rate=0.000602115", "learning_rate=1e-05"]


def test_a_key_that_follows_from_another_makes_no_grid(write_run, tmp_path):
    """A search lowers lr_min with a rate below it."""
    jobs = {
        f"job{i}": {"optimizer__learning_rate": rate, "scheduler__lr_min": min(rate / 10, 1e-7)}
        for i, rate in enumerate((1e-7, 1e-6, 1e-5))
    }
    assert contents(write_sweep(write_run, tmp_path / "sweep", **jobs))["sections"][0]["heat"] is None


def test_two_swept_keys_make_a_grid(write_run, tmp_path):
    grid = [(rate, decay) for rate in (1e-6, 1e-5) for decay in (0.0, 0.1)]
    jobs = {
        f"job{i}": {"optimizer__learning_rate": rate, "optimizer__weight_decay": decay, "accuracies": (0.4, 0.5 + i / 10)}
        for i, (rate, decay) in enumerate(grid)
    }
    section = contents(write_sweep(write_run, tmp_path / "sweep", **jobs))["sections"][0]
    assert section["heat"]["columns"] == ["1e-06", "1e-05"]
    assert {down: [cell["text"] for cell in row.values()] for down, row in section["heat"]["rows"].items()} == {
        "0.0": ["50.0 %", "70.0 %"],
        "0.1": ["60.0 %", "80.0 %"],
    }
    assert [series["name"] for series in section["charts"][0]["series"]] == ["weight_decay=0.0", "weight_decay=0.1"]


LUCKY = {1e-6: (0.5, 0.55, 0.6), 1e-5: (0.80, 0.82, 0.84), 1e-4: (0.95, 0.3, 0.4), 1e-3: (0.97, 0.98, None)}


def seeds_of(write_run, folder, ends, **keys):
    """Jobs of rates and seeds; None for one that diverged."""
    for rate, some in ends.items():
        for seed, end in enumerate(some):
            number = sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
            own = {"optimizer__learning_rate": rate, "seed": seed, **keys}
            status = "diverged" if end is None else "completed"
            write_run(folder / str(number), accuracies=(0.4 + seed / 10, end or 0.0), status=status, **own)
    return folder


def test_seeds_are_drawn_as_the_mean_of_their_value(write_run, tmp_path):
    """By hand: of .80, .82, .84 Student's interval is .82 +- 4.303 * .02 / sqrt(3), .770 to .870; Wilson's .761 to .867."""
    page = contents(seeds_of(write_run, tmp_path / "sweep", LUCKY))
    chart = charts(page)["over-values"]
    (series,) = chart["series"]
    means = [point for point in series["points"] if len(point) > 2]
    assert [point[0] for point in means] == [1e-6, 1e-5, 1e-4]
    assert [point[1] for point in means] == pytest.approx([0.55, 0.82, 0.55])
    assert means[1][2:] == pytest.approx([0.761, 0.870], abs=1e-3)
    assert [tuple(point) for point in series["points"] if len(point) == 2] == [
        (rate, end) for rate, some in LUCKY.items() for end in some if end is not None
    ]
    assert len(series["notes"]) == len(series["colours"]) == len(series["points"])
    assert series["notes"][:2] == [
        "learning_rate=1e-06, mean over 3 seeds",
        "learning_rate=1e-06 seed=0, completed, 200 problems",
    ]
    assert chart["crosses"] == [{"at": 1e-3, "name": "learning_rate=0.001 seed=2: diverged"}]
    assert chart["levels"] == [{"at": pytest.approx(0.5), "name": "before training"}]
    rows = page["sections"][0]["table"]["rows"]
    assert [row["rank"] for row in rows] == [*[""] * 3, *["best"] * 3, *["tied"] * 3, *[""] * 3]
    assert len({tuple(row["colour"]) for row in rows}) == 4, "seeds of a rate have its colour"


def test_the_verdict_on_seeds_is_the_doctor_s(write_run, tmp_path):
    page = contents(seeds_of(write_run, tmp_path / "sweep", LUCKY))
    assert page["verdict"]["lead"] == "Best of 4: learning_rate=1e-05"
    assert page["verdict"]["text"] == (
        "held-out accuracy ends at 82.0 % (95 % interval 76.1 to 87.0 %) over 3 seeds, on 200 problems; before training it "
        "was 50.0 %. Noise does not tell it from learning_rate=0.0001. learning_rate=0.001 is not ranked: job 11 diverged."
    )
    assert ["jobs", "12", ""] in page["tiles"]


def test_seeds_alone_have_no_best(write_run, tmp_path):
    page = contents(seeds_of(write_run, tmp_path / "sweep", {1e-5: (0.82, 0.91, 0.99)}))
    assert page["verdict"]["lead"] == "3 seeds: 90.7 %"
    assert page["verdict"]["text"].endswith("A better seed is luck.")
    assert [row["rank"] for row in page["sections"][0]["table"]["rows"]] == ["", "", ""]
    assert [point[0] for point in charts(page)["over-values"]["series"][0]["points"]] == [0, 1, 2]
    lost = contents(seeds_of(write_run, tmp_path / "lost", {1e-5: (0.82, None)}))["verdict"]
    assert (lost["mood"], lost["lead"]) == ("bad", "No best candidate")
    assert lost["text"].endswith("There is no mean over the seeds: job 1 diverged.")


def test_a_grid_of_two_keys_has_means_over_the_seeds(write_run, tmp_path):
    folder = tmp_path / "sweep"
    for decay, ends in ((0.0, {1e-6: (0.5, 0.7), 1e-5: (0.9, None)}), (0.1, {1e-6: (0.6, 0.7), 1e-5: (0.8, 0.9)})):
        seeds_of(write_run, folder, ends, optimizer__weight_decay=decay)
    heat = contents(folder)["sections"][0]["heat"]
    assert {down: [cell["text"] for cell in row.values()] for down, row in heat["rows"].items()} == {
        "0.0": ["60.0 %", "diverged"],
        "0.1": ["65.0 %", "85.0 %"],
    }


def test_jobs_that_have_not_begun_are_taken_from_the_sweep_s_list(sweep):
    jobs = [
        {"job": "1", "overrides": ["a=1"], "status": "completed"},
        {"job": "11", "overrides": ["b=2"], "status": "waiting"},
    ]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs, "mode": "fused"}))
    page = contents(sweep)
    assert ["run as", "fused", ""] in page["tiles"]
    assert [row["cells"][1][0] for row in page["sections"][0]["table"]["rows"]][-1] == "b=2"
    assert len(page["sections"][0]["table"]["rows"]) == 5


def test_the_first_job_of_a_sweep_is_told_from_those_that_wait(write_run, tmp_path):
    folder = write_sweep(write_run, tmp_path / "sweep", job0={"optimizer__learning_rate": 1e-6, "status": None})
    rates = [f"optimizer.learning_rate={rate}" for rate in ("1e-6", "1e-5", "1e-4")]
    jobs = [{"job": str(i), "overrides": ["+experiment=quick_test", rate]} for i, rate in enumerate(rates)]
    (folder / "sweep.json").write_text(json.dumps({"jobs": jobs, "mode": "one after another"}))
    page = contents(folder)
    assert page["verdict"]["lead"] == "Best of 3 so far: learning_rate=1e-06"
    told = [row["cells"][1][0] for row in page["sections"][0]["table"]["rows"]]
    assert told == ["learning_rate=1e-06", "learning_rate=1e-5", "learning_rate=1e-4"]


def test_a_job_whose_configuration_is_cut_short_does_not_hide_the_others(sweep):
    (sweep / "2" / "config.yaml").write_text("a: [1,")
    rows = contents(sweep)["sections"][0]["table"]["rows"]
    assert len(rows) == 4
    assert "config.yaml cannot be read" in [row["cells"][-1][0] for row in rows]


def test_a_tune_is_its_verdict_its_command_and_a_section_a_stage(sweep, tmp_path):
    tune = tmp_path / "tune"
    tune.mkdir()
    sweep.rename(tune / "1-coarse")
    stages = [
        {"name": "1-coarse", "title": "Coarse rate", "key": "k", "folder": "1-coarse", "conclusion": "so", "chosen": 1e-5},
        {"name": "2-fine", "title": "Fine rate", "folder": "2-fine"},
        {"name": "out", "folder": "../.."},
    ]
    record = {"status": "running", "stages": stages, "best": {"k": 1e-5}, "command": "python x", "verdict": "It is so."}
    (tune / "tune.json").write_text(json.dumps(record))
    page = contents(tune)
    assert page["kind"] == "tune"
    assert page["verdict"]["text"] == "It is so."
    assert page["next"] == ["python x"]
    assert page["best_yaml"] == "k: 1.0e-05\n"
    assert [(s["title"], s["text"]) for s in page["sections"]] == [
        ("Coarse rate", "so"),
        ("Fine rate", "No conclusion yet."),
        ("out", "No conclusion yet."),
    ]
    assert "over-values" in charts(page)
    assert not charts(page, 2), "nothing outside the folder is read"
    (tune / "best.yaml").write_text("# mine\n")
    assert contents(tune)["best_yaml"] == "# mine\n"


def test_a_tune_tells_once_what_ailed_a_candidate(sweep, tmp_path):
    tune = tmp_path / "tune"
    tune.mkdir()
    sweep.rename(tune / "1-coarse")
    shutil.copytree(tune / "1-coarse" / "2", tune / "2-fine" / "0")
    stages = [{"name": name, "title": name[2:], "folder": name} for name in ("1-coarse", "2-fine")]
    (tune / "tune.json").write_text(json.dumps({"status": "completed", "stages": stages}))
    diverging = [finding for finding in contents(tune)["findings"] if finding["illness"] == "diverging"]
    assert [finding["candidate"] for finding in diverging] == ["coarse: learning_rate=0.0001"]


def test_a_search_without_an_end_may_be_at_work_or_dead(tmp_path):
    for status, alive in (("running", True), ("interrupted", False)):
        (tmp_path / "tune.json").write_text(json.dumps({"status": status, "stages": [], "verdict": ""}))
        verdict = contents(tmp_path)["verdict"]
        assert verdict["mood"] == "going"
        assert ("or was killed" in verdict["text"]) is alive


def test_a_tune_that_found_or_gained_nothing_is_not_praised(tmp_path):
    record = {"status": "completed", "stages": [], "best": {"k": 1e-5}, "verdict": "So it is."}
    for own, headline in (
        ({}, ("good", "Tuned")),
        ({"gained": True}, ("good", "Tuned")),
        ({"gained": False}, ("unsure", "Nothing gained")),
        ({"best": {}}, ("bad", "Nothing found")),
    ):
        (tmp_path / "tune.json").write_text(json.dumps(record | own))
        verdict = contents(tmp_path)["verdict"]
        assert (verdict["mood"], verdict["lead"]) == headline


def test_the_learning_rate_finder_is_shown_where_it_was_run(write_run, tmp_path):
    folder = write_run(tmp_path / "run")
    found = {"rates": [1e-6, 1e-5, 1e-4], "reward": [0.1, None, 0.3], "kl": [0.1, 0.2, 0.3], "suggested": 1e-5}
    (folder / "lr_find.json").write_text(json.dumps({**found, "range": [1e-6, 3e-5], "conclusion": "Take 1e-05."}))
    page = contents(folder)
    assert page["sections"][0]["text"] == "Take 1e-05."
    reward = charts(page)["finder-reward"]
    assert reward["series"][0]["points"] == [[1e-6, 0.1], [1e-4, 0.3]]
    assert reward["marks"] == [{"at": 1e-5, "name": "suggested 1e-05"}]
    assert reward["band"] == [1e-6, 3e-5]
    assert (page["verdict"]["lead"], page["verdict"]["text"]) == ("Suggested learning rate: 1e-05", "Take 1e-05.")
    assert "findings" not in page, "a ramp collapses on purpose"
    assert ["learning rate", "1e-05 → 1e-05", "adamw, a ramp"] in page["tiles"]
    (folder / "lr_find.json").write_text(json.dumps({**found, "suggested": None, "conclusion": "No gain."}))
    assert contents(folder)["verdict"]["lead"] == "No learning rate to suggest"


def test_a_sweep_of_ramps_is_not_judged_by_how_they_ended(sweep):
    for job, rate in (("0", 1e-5), ("1", None)):
        (sweep / job / "lr_find.json").write_text(json.dumps({"suggested": rate, "conclusion": "Said."}))
    page = contents(sweep)
    assert page["verdict"]["lead"] == "2 ramps of lr-find"
    assert page["verdict"]["text"] == (
        "Suggested learning rates: learning_rate=1e-06: 1e-05; learning_rate=1e-05: No learning rate to suggest."
    )
    assert "findings" not in page
    assert {row["rank"] for row in page["sections"][0]["table"]["rows"]} == {""}


def test_a_folder_of_something_else_is_said_to_be_that(tmp_path):
    assert kind_of(tmp_path / "absent") is None
    (tmp_path / "metrics.jsonl").write_text("")  # of a run whose config.yaml is gone
    with pytest.raises(UserError, match=r"holds no run.*config\.yaml"):
        contents(tmp_path)


def test_long_runs_and_long_completions_stay_below_two_megabytes(write_run, tmp_path):
    for i in range(6):
        write_run(tmp_path / str(i), steps=3000, completion="x\u4e2d" * 5_000, optimizer__learning_rate=10.0 ** (i - 9))
    page = render(tmp_path)
    assert len(page.encode()) < 2_000_000
    assert len(page.encode()) > 500_000, "and not by showing nothing"


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
RECORDS = st.dictionaries(
    st.sampled_from(["step", "lr", "kl", "reward/mean", "reward/a", "n", "accuracy", "split", "prompt", "completion"])
    | st.sampled_from(["rewards", "reward", "advantage", "status", "steps", "rollbacks", "advice", "seconds"]),
    VALUES | st.lists(st.dictionaries(st.text(max_size=2), VALUES, max_size=2), max_size=2),
)
LINES = st.lists(RECORDS.map(json.dumps) | st.text(max_size=20), max_size=12).map("\n".join)
STATES = st.dictionaries(
    st.sampled_from(["stages", "best", "verdict", "jobs", "mode", "rates", "reward", "kl", "suggested", "range", "status"]),
    VALUES
    | st.lists(
        st.dictionaries(st.sampled_from(["name", "folder", "job", "overrides", "chosen", "key"]), VALUES), max_size=3
    ),
)


@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(LINES, LINES, LINES, RECORDS, STATES, st.sampled_from(["run", "sweep", "tune"]))
def test_no_records_make_it_raise(write_run, tmp_path_factory, metrics, evals, samples, summary, states, kind):
    folder = tmp_path_factory.mktemp("mangled")
    run = write_run(folder / ("0" if kind != "run" else "run"), steps=2)
    for name, text in {"metrics.jsonl": metrics, "evals.jsonl": evals, "samples.jsonl": samples}.items():
        (run / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    (run / "summary.json").write_text(json.dumps(summary))
    name = {"run": "lr_find.json", "sweep": "sweep.json", "tune": "tune.json"}[kind]
    ((run if kind == "run" else folder) / name).write_text(json.dumps(states))
    page = contents(run if kind == "run" else folder)
    assert page["kind"] == kind
    json.dumps(page, allow_nan=False)
