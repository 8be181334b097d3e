// Builds the page from its data: the verdict first, then what supports it. A live page asks its server for newer data
// and redraws only what has changed, so that nothing a reader has opened, switched or scrolled is lost.

const POLL = 2000; // milliseconds
const SAMPLES_NOTE = "The best and the worst completion of a prompt, by its reward. "
  + "Training makes those with an advantage above zero likelier, and those below zero less likely.";
const SHOWN_NOTE = "Worked answers of the data, which supervised training makes likelier; the model did not write them.";
const SIGNS = { good: "✓", bad: "✕", unsure: "?", going: "…" };

// Children by key: kept where their data is the same, updated where they can be, else built anew.
function patch(parent, parts) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  parts.forEach(({ key, data, build, update }, i) => {
    const json = JSON.stringify(data);
    let node = old.get(key);
    old.delete(key);
    if (!node) node = build(data);
    else if (node.json !== json && (update || node.update)) (update ?? node.update)(data, node);
    else if (node.json !== json) {
      const fresh = build(data), focus = node.contains(document.activeElement) && document.activeElement.dataset.focus;
      node.replaceWith(fresh);
      node = fresh;
      if (focus) [...node.querySelectorAll("[data-focus]")].find((one) => one.dataset.focus === focus)?.focus();
    }
    Object.assign(node, { json });
    node.dataset.key = key;
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] ?? null);
  });
  for (const node of old.values()) node.remove();
}

// A fold that stays as the reader left it.
function fold(key, summary, open, ...inside) {
  const node = make("details", { open: state.open.get(key) ?? open }, make("summary", { "data-focus": key }, summary), ...inside);
  node.addEventListener("toggle", () => state.open.set(key, node.open));
  return node;
}

function command(text) {
  const code = make("code", {}, text);
  const button = make("button", { type: "button", class: "copy", "aria-label": `copy: ${text}` }, "copy");
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code); // where the clipboard is out of reach, the text is ready to be copied by hand
    const copied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
    button.textContent = copied ? "copied" : "selected";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  return make("div", { class: "command" }, code, button);
}

// A percent sign stays on the line of its number.
const firm = (text) => text.replaceAll(" %", "\u00a0%");

function verdictPart({ kind, name, verdict }) {
  document.title = `${name}: ${verdict.lead}`;
  return make("header", { class: `verdict ${verdict.mood}` },
    make("p", { class: "what" }, `${kind} `, make("b", {}, name)),
    make("h1", {}, make("span", { class: "sign", "aria-hidden": "true" }, SIGNS[verdict.mood] ?? ""), verdict.lead),
    make("p", { class: "said" }, firm(verdict.text.charAt(0).toUpperCase() + verdict.text.slice(1))));
}

function tilesPart(tiles) {
  return make("dl", { class: "tiles" }, ...tiles.map(([name, value, detail]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, firm(value), make("small", {}, firm(detail))))));
}

function findingNode(finding) {
  return make("li", { class: `finding ${finding.severity}` },
    make("h3", {}, finding.illness, make("span", { class: "severity" }, finding.severity),
      finding.candidate ? make("span", { class: "of" }, finding.candidate) : null),
    make("p", {}, finding.evidence), make("p", { class: "try" }, "Try:"), command(finding.remedy));
}

function findingsPart({ findings, judged_by: judgedBy, vitals }) {
  const whole = findings.filter((one) => !one.candidate), single = findings.filter((one) => one.candidate);
  const list = (some) => make("ul", { class: "findings" }, ...some.map(findingNode));
  const nothing = whole.length ? null : make("p", {}, single.length ? "Nothing about the candidates as a whole." : "The doctor finds nothing wrong in the numbers.");
  return make("section", { class: "doctor" }, make("h2", {}, "The doctor's findings"),
    judgedBy ? make("p", { class: "note" }, judgedBy) : null, nothing, list(whole),
    single.length ? fold("findings", `Findings on single candidates (${single.length})`, false, list(single)) : null,
    vitals ? fold("vitals", "The numbers it judged by", false, make("table", { class: "plain" },
      ...Object.entries(vitals).map(([name, value]) => make("tr", {}, make("th", {}, name), make("td", {}, value))))) : null);
}

function setsPart(sets) {
  const head = ["set", "first accuracy", "last accuracy", "problems"].map((name) => make("th", { scope: "col" }, name));
  const row = ([name, ...cells]) => make("tr", {}, make("th", { scope: "row" }, name), ...cells.map((cell) => make("td", {}, firm(cell))));
  return make("section", { class: "sets" }, make("h2", {}, "Further test sets"),
    wide("further test sets", make("table", { class: "plain" }, make("tr", {}, ...head), ...sets.map(row))));
}

function nextPart({ next, best_yaml: bestYaml }) {
  return make("section", { class: "next" }, make("h2", {}, "What to run next"), ...next.map(command),
    bestYaml ? make("div", {}, make("h3", {}, "best.yaml"), make("pre", { class: "yaml" }, bestYaml)) : null);
}

function sectionHead({ title, text, chosen }) {
  return make("section", { class: "stage" }, make("h2", {}, title), text ? make("p", {}, firm(text)) : null,
    chosen ? make("p", { class: "chosen" }, "Chosen: ", make("b", {}, chosen)) : null);
}

function legendPart({ legend, id }) {
  const node = make("div", { class: "legend shared", role: "group", "aria-label": "candidates shown in the charts" });
  const draw = () => fill(node, legend.map((series) => legendEntry(series, id, () => {
    draw();
    for (const chart of charts.values()) if (chart.scope === id) chart.paint();
  })));
  draw();
  return node;
}

function chartParts({ id, charts: drawn, legend }) {
  return drawn.map((chart) => {
    const shared = legend && !chart.series.some((series) => series.notes.length) ? id : null;
    const key = `${id} ${chart.id}`;
    return { key, data: chart, build: (data) => new ChartView(data, key, shared).node };
  });
}

// What is wider than the page scrolls by itself, by keyboard too.
function wide(name, ...inside) {
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, ...inside);
}

function tablePart({ id, table }) {
  const node = make("section", { class: "candidates" });
  const draw = () => fill(node, [make("h2", {}, "Candidates"), wide("candidates",
    make("table", {}, make("thead", {}, headRow(id, table, draw)), make("tbody", {}, ...sorted(id, table).map(candidateRow))))]);
  draw();
  return node;
}

function headRow(id, table, draw) {
  const [column, down] = state.sort.get(id) ?? [0, false];
  return make("tr", {}, ...table.heads.map((head, i) => {
    const order = i === column ? (down ? "descending" : "ascending") : "none";
    const act = () => { state.sort.set(id, [i, i === column && !down]); draw(); };
    return make("th", { scope: "col", "aria-sort": order }, make("button", { type: "button", "data-focus": `${id} sort ${i}`, onclick: act }, head));
  }));
}

function sorted(id, table) {
  const [column, down] = state.sort.get(id) ?? [0, false];
  const order = (a, b) => {
    const [[p, x], [q, y]] = [a.cells[column], b.cells[column]];
    if ((x === null) !== (y === null)) return x === null ? 1 : -1; // what has no number comes last, up or down
    const difference = x === null ? String(p).localeCompare(q) : x - y;
    return down ? -difference : difference;
  };
  return [...table.rows].sort(order);
}

function candidateRow({ colour, rank, cells, page, live, id }) {
  const href = shownData.live ? live : page; // a live page leads to what its server serves
  const name = href ? make("a", { href }, cells[0][0]) : cells[0][0];
  const mark = rank ? make("span", { class: `rank ${rank}` }, rank === "best" ? "★ best" : "≈ best") : null;
  return make("tr", { class: rank, "data-job": id },
    make("td", {}, make("span", { class: "swatch", colour }), name),
    make("th", { scope: "row" }, cells[1][0], mark),
    ...cells.slice(2).map(([text]) => make("td", {}, text)));
}

function heatPart({ across, down, columns, rows }) {
  const cell = (found) => {
    const node = make("td", {}, found?.text ?? "");
    if (found?.share != null) node.style.setProperty("--share", `${Math.round(70 * found.share)}%`);
    return node;
  };
  return make("section", { class: "heat" }, make("h2", {}, "Accuracy over both keys"), wide("heat", make("table", {},
    make("thead", {}, make("tr", {}, make("th", {}, `${down} ↓  ${across} →`), ...columns.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...Object.entries(rows).map(([name, cells]) =>
      make("tr", {}, make("th", { scope: "row" }, name), ...columns.map((column) => cell(cells[column]))))))));
}

function turnNode({ who, text, calls }) {
  const read = calls.map((call) => make("li", {}, "calls ", make("code", {}, call)));
  return make("div", { class: who === "assistant" ? "turn own" : "turn" }, make("p", { class: "who" }, who), make("pre", {}, text),
    ...(read.length ? [make("ul", {}, ...read)] : []));
}

function completionNode(one) {
  const rewards = Object.entries(one.rewards).map(([name, value]) => `${name} ${number(value, 3)}`).join(", ");
  const sums = [["reward", one.reward], ["advantage", one.advantage]].filter(([, value]) => value != null);
  const said = sums.map(([name, value]) => `${name} ${number(value, 3)}`).join(", ");
  return make("div", { class: one.advantage > 0 ? "completion up" : one.advantage < 0 ? "completion down" : "completion" },
    ...(one.turns.length ? one.turns.map(turnNode) : [make("pre", {}, one.text)]),
    ...(one.ending ? [make("p", { class: "ending" }, one.ending)] : []),
    make("p", {}, said, make("br"), make("small", {}, rewards)));
}

function samplesPart({ id, samples }) {
  const node = make("section", { class: "samples" });
  const draw = () => {
    const chosen = samples.find((one) => one.name === state.chosen.get(id)) ?? samples[0];
    const choice = make("select", { "aria-label": "candidate", "data-focus": `${id} samples` },
      ...samples.map((one) => make("option", { selected: one === chosen }, one.name)));
    choice.addEventListener("change", () => { state.chosen.set(id, samples[choice.selectedIndex].name); draw(); });
    const written = chosen.columns.some((column) => column.completions.some((one) => one.reward != null));
    fill(node, [make("h2", {}, written ? "Completions from early to late" : "What it learnt from, from early to late"),
      make("p", { class: "note" }, written ? SAMPLES_NOTE : SHOWN_NOTE),
      samples.length > 1 ? make("p", {}, choice) : null,
      wide("completions", make("div", { class: "columns" }, ...chosen.columns.map(columnNode)))].filter(Boolean));
  };
  draw();
  return node;
}

function columnNode({ step, prompt, answer, completions }) {
  return make("article", {}, make("h3", {}, `update ${step}`), make("p", { class: "prompt" }, prompt),
    make("p", { class: "truth" }, "truth: ", make("b", {}, answer)), ...completions.map(completionNode));
}

function settingsPart(settings) {
  const changed = settings.filter((one) => one.shipped !== null || one.varied).length;
  const only = make("input", { type: "checkbox", "data-focus": "only changed", checked: state.chosen.get("only changed") ?? false });
  const row = (one) => make("tr", { class: one.varied ? "varied" : one.shipped !== null ? "changed" : "" }, make("th", { scope: "row" }, one.key),
    make("td", {}, one.value), make("td", {}, one.varied ? "differs between candidates" : one.shipped === null ? "" : `shipped: ${one.shipped}`));
  const table = make("table", { class: "plain" }, ...settings.map(row));
  const show = () => { table.classList.toggle("only", only.checked); state.chosen.set("only changed", only.checked); };
  only.addEventListener("change", show);
  show();
  return make("section", { class: "settings" }, fold("settings", `Configuration (${settings.length} keys, ${changed} not as shipped)`, false,
    make("label", {}, only, " only what is not as shipped"), wide("configuration", table)));
}

function sectionParts(section) {
  const { id, title, legend, heat, table, samples } = section, parts = [];
  const add = (name, data, build, update) => parts.push({ key: `${id} ${name}`, data, build, update });
  if (title) add("head", { title, text: section.text, chosen: section.chosen }, sectionHead);
  if (heat) add("heat", heat, heatPart);
  if (legend?.length) add("legend", { legend, id }, legendPart);
  const grid = (data, node) => { patch(node, chartParts(data)); return node; };
  add("charts", { id, charts: section.charts, legend }, (data) => grid(data, make("div", { class: "charts" })), grid);
  if (table) add("table", { id, table }, tablePart);
  if (samples?.length) add("samples", { id, samples }, samplesPart);
  return parts;
}

let shownData = JSON.parse(document.getElementById("data").textContent);
const news = make("p", { class: "news", role: "status" });

function show(data) {
  shownData = data;
  const { kind, name, verdict, tiles, sets, findings, judged_by, vitals, next, best_yaml, sections, settings } = data;
  patch(document.getElementById("page"), [
    { key: "verdict", data: { kind, name, verdict }, build: verdictPart },
    { key: "tiles", data: tiles, build: tilesPart },
    ...(sets?.length ? [{ key: "sets", data: sets, build: setsPart }] : []),
    ...(findings ? [{ key: "findings", data: { findings, judged_by, vitals }, build: findingsPart }] : []),
    ...(next?.length || best_yaml ? [{ key: "next", data: { next, best_yaml }, build: nextPart }] : []),
    ...sections.flatMap(sectionParts),
    ...(settings.length ? [{ key: "settings", data: settings, build: settingsPart }] : []),
  ]);
}

// Reading a long run takes its server a while; the page waits the longer, so that training keeps the machine.
async function poll() {
  const asked = performance.now();
  try {
    if (!document.hidden) show(await (await fetch("data.json", { cache: "no-store" })).json());
    news.textContent = "live";
  } catch {
    news.textContent = "The server is gone; this is what it said last.";
  }
  setTimeout(poll, Math.max(POLL, 5 * (performance.now() - asked)));
}

show(shownData);
if (shownData.live) {
  document.body.prepend(news);
  poll();
}
