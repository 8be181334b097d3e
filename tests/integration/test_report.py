"""The report in a real browser: it draws, answers to pointer and keyboard, follows a run, and asks for nothing."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading

import pytest

from agent_tunix.lab.report import watch
from agent_tunix.lab.report.page import write_report

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1200,900"
)
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
# A chart is drawn when its size is known, and again when that changes: after two frames nothing moves any more.
SETTLED = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)))"
RATES = {"0": 1e-7, "1": 1e-6, "2": 1e-5, "3": 1e-4}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Debian's chromium, without a window."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e '.[test]'")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def eventually():
    from selenium.webdriver.support.ui import WebDriverWait

    def wait(browser, condition):
        return WebDriverWait(browser, 30, poll_frequency=0.1).until(lambda _: condition())

    return wait


@pytest.fixture(scope="module")
def folders(write_run, tmp_path_factory):
    """A run, a long one, a sweep of learning rates and a tune of one stage."""
    root = tmp_path_factory.mktemp("folders")
    run = write_run(root / "run", completion=HOSTILE, grpo__beta=0.04)
    ends = {"0": 0.4, "1": 0.5, "2": 0.9, "3": 0.1}
    for name, rate in RATES.items():
        status = "diverged" if name == "3" else "completed"
        write_run(root / "sweep" / name, accuracies=(0.4, ends[name]), status=status, optimizer__learning_rate=rate)
    shutil.copytree(root / "sweep", root / "tune" / "1-coarse")
    stage = {"name": "1-coarse", "folder": "1-coarse", "title": "Coarse learning rate", "conclusion": "Take 1e-05."}
    tune = {"status": "completed", "stages": [stage], "best": {"a": 1}, "command": "python go", "verdict": "Take it."}
    (root / "tune" / "tune.json").write_text(json.dumps(tune))
    long = write_run(root / "long", steps=300)
    for folder in (run, long, root / "sweep", root / "tune"):
        write_report(folder)
    return root


@pytest.fixture
def open_page(browser, folders, eventually):
    """Opens a report from its file, and checks when all is done that it was quiet."""

    def open_(name):
        browser.get((folders / name / "report.html").as_uri())
        eventually(browser, lambda: texts(browser, "figure .tick"))
        browser.execute_async_script(SETTLED)

    yield open_
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return window.hacked") is None


def all_of(browser, selector: str) -> list:
    return browser.find_elements("css selector", selector)


def texts(browser, selector: str) -> list[str]:
    """Read in one stroke, so that no redraw comes between finding and reading."""
    script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.innerText ?? node.textContent)"
    return browser.execute_script(script, selector)


def attributes(browser, selector: str, name: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.getAttribute(arguments[1]))"
    return browser.execute_script(script, selector, name)


def press(browser, selector: str, text: str) -> None:
    next(node for node in all_of(browser, selector) if text in node.text).click()


def hover(browser, selector: str, across: float) -> None:
    """Puts the pointer over a place of a chart's drawing, from 0 at its left to 1 at its right."""
    from selenium.webdriver.common.action_chains import ActionChains

    drawing = all_of(browser, selector)[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", drawing)
    ActionChains(browser).move_to_element_with_offset(drawing, (across - 0.5) * drawing.size["width"], 0).perform()


def test_a_run_is_drawn_with_its_verdict_first(open_page, browser):
    open_page("run")
    assert texts(browser, "main > :first-child h1")[0].endswith("Healthy")
    assert "rose from 40.0 % to 80.0 %" in texts(browser, ".said")[0].replace("\u00a0", " ")
    assert attributes(browser, "figure", "data-chart") == ["accuracy", "reward", "kl", "grad_norm", "lr", "entropy"]
    assert all("M" in path for path in attributes(browser, "figure .line", "d"))
    assert set(attributes(browser, "figure svg", "role")) == {"img"}
    assert all(len(words) > 40 for words in attributes(browser, "figure svg", "aria-label"))


def test_ticks_say_where_they_are(open_page, browser, write_run, tmp_path):
    folder = write_run(tmp_path / "run")
    lengths = [{"step": step, "completion/length": length} for step, length in enumerate((13.8, 14.2, 14.9), start=1)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lengths)))
    write_report(folder)
    open_page(folder)
    assert {"14", "14.25", "14.5"} < set(texts(browser, "[data-chart='completion/length'] .tick"))


def test_completions_are_shown_as_text(open_page, browser):
    open_page("run")
    shown = texts(browser, ".samples article pre")
    assert len(shown) == 5
    assert shown[0] == HOSTILE
    assert "advantage 0.5" in texts(browser, ".samples article")[0]


def test_an_episode_is_shown_turn_by_turn_as_text(open_page, browser, write_run, tmp_path):
    folder = write_run(tmp_path / "run")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": HOSTILE}}}
    said = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": HOSTILE, "tool_calls": [call]},
        {"role": "tool", "name": HOSTILE, "content": HOSTILE},
        {"role": "assistant", "content": "2"},
    ]
    sample = {"step": 1, "prompt": "1+1?", "answer": "2", "completion": "2", "transcript": said}
    (folder / "samples.jsonl").write_text(json.dumps(sample))
    write_report(folder)
    open_page(folder)
    assert texts(browser, ".samples article pre") == [HOSTILE, HOSTILE, "2"]
    assert texts(browser, ".samples .who") == ["assistant", HOSTILE, "assistant"]
    assert texts(browser, ".samples .turn code") == [f"f(x={HOSTILE!r})"]


def test_worked_answers_are_not_called_completions_of_the_model(open_page, browser, write_run, tmp_path):
    folder = write_run(tmp_path / "run", training__method="supervised")
    (folder / "samples.jsonl").write_text('{"step": 1, "prompt": "1+1?", "answer": "2", "completion": "1+1=2"}')
    write_report(folder)
    open_page(folder)
    (shown,) = texts(browser, ".samples")
    assert "1+1=2" in shown
    assert "the model did not write them" in shown
    assert "Completions" not in shown


def test_the_pointer_tells_exact_values(open_page, browser):
    open_page("run")
    for across in (0.4, 0.8):
        hover(browser, "[data-chart=kl] svg", across)
        tip = texts(browser, "[data-chart=kl] .tip")[0]
        step, value = re.fullmatch(r"update (\d+)\s+([\d.]+)", tip).groups()
        assert float(value) == pytest.approx(0.002 * int(step))
        assert abs(int(step) - 24 * across) < 4


def test_the_keyboard_does_too(open_page, browser):
    open_page("run")
    drawing = all_of(browser, "[data-chart=kl] svg")[0]
    drawing.send_keys("\ue011")  # home
    assert "update 1" in texts(browser, "[data-chart=kl] .tip")[0]
    drawing.send_keys("\ue014")  # arrow right
    assert "0.004" in texts(browser, "[data-chart=kl] .tip")[0]
    drawing.send_keys("\ue00c")  # escape
    assert not all_of(browser, "[data-chart=kl] .tip")[0].is_displayed()


def test_a_legend_entry_hides_its_line_and_brings_it_back(open_page, browser):
    open_page("run")
    selector = "[data-chart=reward] [data-series='reward/answer']"
    before = len(all_of(browser, "[data-chart=reward] .series"))
    for pressed, lines in (("false", 0), ("true", 1)):
        press(browser, "[data-chart=reward] .legend button", "answer")
        entry = next(node for node in all_of(browser, "[data-chart=reward] .legend button") if "answer" in node.text)
        assert entry.get_attribute("aria-pressed") == pressed
        assert len(all_of(browser, selector)) == lines
        assert len(all_of(browser, "[data-chart=reward] .series")) == before - 1 + lines
        assert browser.switch_to.active_element == entry, "the focus stays where it was"


def test_the_logarithmic_switch_redraws_the_axis(open_page, browser):
    open_page("run")
    before = texts(browser, "[data-chart=kl] .tick")
    press(browser, "[data-chart=kl] .switches button", "log y")
    after = texts(browser, "[data-chart=kl] .tick")
    assert before != after
    assert "0.01" in after


def test_the_name_of_a_level_lies_under_no_candidate(open_page, browser, write_run, tmp_path):
    for name, end in enumerate((0.38, 0.42, 0.45, 0.39)):
        write_run(tmp_path / "sweep" / str(name), accuracies=(0.39, end), optimizer__learning_rate=10 ** (name - 7.0))
    write_report(tmp_path / "sweep")
    open_page(tmp_path / "sweep")
    boxes = """
      const box = (node) => ["left", "right", "top", "bottom"].map((side) => node.getBoundingClientRect()[side]);
      const chart = document.querySelector("[data-chart=over-values]");
      return [box(chart.querySelector(".halo")), [...chart.querySelectorAll(".dot, .bar")].map(box)];"""
    (left, right, top, bottom), drawn = browser.execute_script(boxes)
    assert len(drawn) == 8, "a dot and a bar each"
    assert all(b < left or a > right or d < top or c > bottom for a, b, c, d in drawn)


def test_a_long_line_that_scatters_is_drawn_by_its_trend(open_page, browser):
    open_page("long")
    chart = "[data-chart=kl]"
    assert len(all_of(browser, f"{chart} .line")) == 2
    assert len(all_of(browser, f"{chart} .line.behind")) == 1
    assert len(all_of(browser, "[data-chart=lr] .line")) == 1, "a schedule does not scatter"
    press(browser, f"{chart} .switches button", "smooth")
    assert len(all_of(browser, f"{chart} .line")) == 1
    assert all_of(browser, f"{chart} .line.behind") == []


def test_the_configuration_can_be_opened_and_narrowed(open_page, browser):
    open_page("run")
    all_of(browser, ".settings summary")[0].click()
    rows = [row for row in all_of(browser, ".settings tr") if row.is_displayed()]
    all_of(browser, ".settings input")[0].click()
    changed = [row.text for row in all_of(browser, ".settings tr") if row.is_displayed()]
    assert 0 < len(changed) < len(rows)
    assert any(row.startswith("model.model_size tiny") for row in changed)
    assert not any(row.startswith("optimizer.weight_decay") for row in changed)


def test_a_sweep_is_drawn_over_its_rates(open_page, browser):
    open_page("sweep")
    assert texts(browser, "h1")[0].endswith("Best of 4: learning_rate=1e-05")
    chart = "[data-chart=over-values]"
    assert len(all_of(browser, f"{chart} circle.dot")) == len(all_of(browser, f"{chart} .bar")) == 3
    assert len(all_of(browser, f"{chart} .cross")) == 1
    hover(browser, f"{chart} svg", 0.67)
    assert "90.0 % learning_rate=1e-05" in texts(browser, f"{chart} .tip")[0].replace("\u00a0", " ")
    colours = {node.value_of_css_property("stroke") for node in all_of(browser, "[data-chart=kl] .line")}
    assert len(colours) == 4


def test_seeds_are_small_beside_the_mean_of_their_value(open_page, browser, write_run, tmp_path):
    """The line goes from mean to mean; the second rate has none, as a seed of it diverged."""
    for job, (rate, seed) in enumerate(itertools.product((1e-6, 1e-5, 1e-4), (0, 1))):
        status = "diverged" if (rate, seed) == (1e-5, 1) else "completed"
        keys = {"optimizer__learning_rate": rate, "seed": seed, "status": status}
        write_run(tmp_path / "sweep" / str(job), accuracies=(0.4, 0.5 + seed / 5), **keys)
    open_page(write_report(tmp_path / "sweep").parent)
    chart = "[data-chart=over-values]"
    assert sorted(attributes(browser, f"{chart} .series circle", "r")) == ["2"] * 5 + ["5"] * 2
    assert len(all_of(browser, f"{chart} .bar")) == 2
    (line,) = attributes(browser, f"{chart} .line", "d")
    assert line.count("L") == 1
    hover(browser, f"{chart} svg", 0.1)
    tip = texts(browser, f"{chart} .tip")[0].replace("\u00a0", " ")
    assert "60.0 % learning_rate=1e-06, mean over 2 seeds" in tip
    assert "70.0 % learning_rate=1e-06 seed=1" in tip


def test_lines_of_several_settings_have_the_colours_of_their_legend(open_page, browser, write_run, tmp_path):
    """Dots have those of the rates, as in all other charts."""
    for job, (name, rate) in enumerate(itertools.product(("adamw", "lion", "sgd"), (1e-6, 1e-5))):
        keys = {"optimizer__optimizer_name": name, "optimizer__learning_rate": rate}
        write_run(tmp_path / "sweep" / str(job), accuracies=(0.4, 0.5 + job / 20), **keys)
    open_page(write_report(tmp_path / "sweep").parent)
    chart = "[data-chart=over-values]"
    lines = [node.value_of_css_property("stroke") for node in all_of(browser, f"{chart} .line")]
    swatches = [node.value_of_css_property("background-color") for node in all_of(browser, f"{chart} .legend .swatch")]
    assert len(set(lines)) == 3
    assert [re.findall(r"\d+", one)[:3] for one in lines] == [re.findall(r"\d+", one)[:3] for one in swatches]


def test_labels_of_values_that_lie_close_do_not_print_over_each_other(open_page, browser, write_run, tmp_path):
    for job, decay in enumerate((0.0, 1e-4, 0.01, 0.1)):
        write_run(tmp_path / "sweep" / str(job), accuracies=(0.4, 0.5), optimizer__weight_decay=decay)
    open_page(write_report(tmp_path / "sweep").parent)
    ticks = "[...document.querySelectorAll('[data-chart=over-values] .tick[text-anchor=middle]')]"
    boxes = browser.execute_script(f"return {ticks}.map((one) => one.getBoundingClientRect()).map((b) => [b.left, b.right])")
    assert len(boxes) >= 2
    assert all(right < left for (_, right), (left, _) in itertools.pairwise(boxes))


PATHS = tuple(f"/home/someone/projects/reasoning/data/version-{i}/train.jsonl" for i in range(3))
NAMES = ("adamw", "lion", "muon", "schedule_free_adamw", "sgd")


@pytest.mark.parametrize(("key", "values"), [("data__path", PATHS), ("optimizer__optimizer_name", NAMES)])
def test_names_that_are_swept_over_keep_apart(open_page, browser, write_run, tmp_path, key, values):
    for i, value in enumerate(values):
        write_run(tmp_path / "sweep" / str(i), accuracies=(0.4, 0.4), **{key: value})
    open_page(write_report(tmp_path / "sweep").parent)
    ticks = "[...document.querySelectorAll('[data-chart=over-values] .tick[text-anchor=middle]')]"
    boxes = browser.execute_script(f"return {ticks}.map((one) => one.getBoundingClientRect()).map((b) => [b.left, b.right])")
    assert len(boxes) == len(set(texts(browser, "[data-chart=over-values] .tick[text-anchor=middle]"))) == len(values)
    assert all(right < left for (_, right), (left, _) in itertools.pairwise(boxes))
    hover(browser, "[data-chart=over-values] svg", 0.95)
    assert values[-1] in texts(browser, "[data-chart=over-values] .tip")[0], "the whole name"


def test_a_caption_hides_no_candidate(open_page, browser):
    open_page("sweep")
    order = "[...document.querySelectorAll('[data-chart=over-values] svg > :is(.halo, .series)')].map((one) => one.tagName)"
    assert browser.execute_script(f"return {order}") == ["text", "g"], "what comes later lies above"


def test_a_candidate_is_switched_in_all_charts_at_once(open_page, browser):
    open_page("sweep")
    charts = ("accuracy", "reward/mean", "kl", "lr")
    press(browser, ".legend.shared button", "1e-06")
    for chart in charts:
        assert attributes(browser, f"[data-chart='{chart}'] .series", "data-series") == ["0", "2", "3"]


def test_the_table_of_candidates_sorts(open_page, browser):
    open_page("sweep")

    def jobs():
        return attributes(browser, ".candidates tbody tr", "data-job")

    assert jobs() == ["0", "1", "2", "3"]
    press(browser, ".candidates thead button", "accuracy")
    assert jobs() == ["0", "1", "2", "3"], "by accuracy, and the one without comes last"
    press(browser, ".candidates thead button", "accuracy")
    assert jobs() == ["2", "1", "0", "3"]
    assert "best" in texts(browser, ".candidates tbody tr")[0]


def test_a_tune_has_its_command_and_a_section_a_stage(open_page, browser):
    open_page("tune")
    assert texts(browser, ".said") == ["Take it."]
    assert "python go" in texts(browser, ".next code")
    assert texts(browser, ".stage h2") == ["Coarse learning rate"]
    assert "Take 1e-05." in texts(browser, ".stage")[0]
    assert len(all_of(browser, "[data-chart=over-values]")) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes(open_page, browser, scheme):
    metrics = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wish = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wish)
    try:
        open_page("sweep")
        browser.execute_script("for (const name of document.querySelectorAll('option')) name.textContent += 'x'.repeat(90)")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
        paper, ink = (
            sum(map(int, re.findall(r"\d+", all_of(browser, "body")[0].value_of_css_property(name))[:3]))
            for name in ("background-color", "color")
        )
        assert (paper > ink) == (scheme == "light")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_policy_stops_a_request_that_is_tried(browser, folders):
    browser.get((folders / "run" / "report.html").as_uri())
    script = "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('sent'), () => done('refused'))"
    assert browser.execute_async_script(script) == "refused"
    assert any("Content Security Policy" in line["message"] for line in browser.get_log("browser"))


def test_a_live_page_follows_the_run_and_keeps_what_was_switched(browser, write_run, tmp_path, eventually):
    folder = tmp_path / "run"
    with watch.Server([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            browser.get(f"http://127.0.0.1:{server.server_port}/")
            eventually(browser, lambda: "Waiting" in texts(browser, "h1")[0])
            write_run(folder, status=None)
            drawn = "at update 24"  # the files come one after the other
            eventually(browser, lambda: drawn in "".join(attributes(browser, "[data-chart=kl] svg", "aria-label")))
            assert "Unfinished" in texts(browser, "h1")[0]
            browser.execute_async_script(SETTLED)
            press(browser, "[data-chart=reward] .legend button", "answer")
            press(browser, ".settings summary", "Configuration")
            browser.execute_script("window.scrollTo(0, 300)")
            with open(folder / "metrics.jsonl", "a") as file:
                file.write('{"step": 25, "kl": 0.75, "lr": 1e-5, "reward/mean": 1.0}\n')
            newest = "0.75 at update 25"
            eventually(browser, lambda: newest in attributes(browser, "[data-chart=kl] svg", "aria-label")[0])
            assert all_of(browser, "[data-series='reward/answer']") == []
            assert attributes(browser, ".settings details", "open") == [""]
            assert browser.execute_script("return window.scrollY") > 0
        finally:
            server.shutdown()
            thread.join()
    asked = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert set(asked) == {f"http://127.0.0.1:{server.server_port}/data.json"}
    eventually(browser, lambda: "server is gone" in texts(browser, ".news")[0])
    browser.get("about:blank")
    browser.get_log("browser")
