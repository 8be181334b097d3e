// Draws one chart as SVG: axes, lines, intervals, a legend whose entries switch lines, and a cursor that tells exact values.
// All text is put in as text; nothing that comes with the data is ever read as HTML.

const HEIGHT = 230, LEFT = 58, RIGHT = 20, TOP = 12, BOTTOM = 36;
const FEW = 60; // points of a line up to which each may have a dot and its interval; all lines together, three times as many
const LABEL = 40; // pixels that the label of a tick takes
const ROWS = 14; // lines of a tooltip
const TICK_DIGITS = 5; // so that 14.25 is not called 14.3; zeros at the end are not written

// What the reader has chosen; it outlives every redraw.
const state = { hidden: new Set(), logarithmic: new Map(), smooth: new Map(), open: new Map(), sort: new Map(), chosen: new Map() };
const charts = new Map();

function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "circle", "text"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "colour") {
      node.style.setProperty("--light", value[0]);
      node.style.setProperty("--dark", value[1]);
    } else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

// New children; a button that had the focus has it again.
function fill(parent, children) {
  const focus = parent.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
  parent.replaceChildren(...children);
  if (focus) [...parent.querySelectorAll("[data-focus]")].find((node) => node.dataset.focus === focus)?.focus();
}

function toggle(name, pressed, focus, act, ...inside) {
  const attributes = { type: "button", "aria-pressed": String(pressed), "data-focus": focus, onclick: () => act(!pressed) };
  return make("button", attributes, ...inside, name);
}

// Entries with one scope are switched together: a candidate in all charts, a metric in its own.
function legendEntry(series, scope, after) {
  const id = `${scope} ${series.id}`;
  const swatch = make("span", { class: `swatch dash${series.dash}`, colour: series.colour });
  return toggle(series.name, !state.hidden.has(id), id, (on) => {
    if (on) state.hidden.delete(id);
    else state.hidden.add(id);
    after();
  }, swatch);
}

// The values whose labels do not print over each other, from the lowest on.
function keepingApart(values, x) {
  const kept = [];
  for (const value of values) if (!kept.length || x.at(value) - x.at(kept.at(-1)) >= LABEL) kept.push(value);
  return kept;
}

// A chart that can be given newer data: its node stays, so that focus, scroll and cursor do.
class ChartView {
  constructor(chart, key, scope) {
    Object.assign(this, { chart, key, scope: scope ?? key, sharedLegend: scope != null, cursor: null, drawn: null });
    this.svg = make("svg", { role: "img", tabindex: 0, class: "drawing" });
    this.tip = make("div", { class: "tip", hidden: true, role: "status" });
    this.plot = make("div", { class: "plot" }, this.svg, this.tip);
    this.heading = make("h3");
    this.switches = make("span", { class: "switches" });
    this.note = make("p", { class: "note" });
    this.legend = make("div", { class: "legend" });
    const top = make("div", { class: "heading" }, this.heading, this.switches);
    this.node = make("figure", { class: "chart", "data-chart": chart.id }, make("figcaption", {}, top, this.note), this.plot, this.legend);
    this.node.update = (newer) => { this.chart = newer; this.paint(); };
    const listen = (name, act) => this.svg.addEventListener(name, act);
    for (const name of ["pointermove", "pointerdown"]) listen(name, (event) => this.follow(event));
    for (const name of ["pointerleave", "blur"]) listen(name, () => this.leave());
    listen("keydown", (event) => this.walk(event));
    new ResizeObserver(() => this.paint()).observe(this.plot);
    charts.set(key, this);
  }

  log(axis) { return state.logarithmic.get(`${this.key} ${axis}`) ?? this.chart[`log_${axis}`]; }
  value(y) { return this.chart.percent ? percentage(y) : number(y); }
  place(x) { return this.chart.categories.length ? this.chart.categories[x] ?? "" : `${this.chart.x_label} ${number(x)}`; }
  shown() { return this.chart.series.filter((series) => !state.hidden.has(`${this.scope} ${series.id}`)); }
  // A long line that scatters is drawn by its trend; alone or in a pair, with what it scatters to behind it.
  smooth() { return state.smooth.get(this.key) ?? true; }
  trendOf(series) { return this.smooth() ? series.trend : []; }
  hidesPoints(series) { return this.trendOf(series).length > 0 && this.shown().length > 2; }
  // What its line goes through: among candidates, single seeds lie beside it.
  through(series) { return series.notes.length ? series.points.filter((p) => p.length > 2) : series.points; }
  usable(p) { return (!this.log("y") || p[1] > 0) && (!this.log("x") || p[0] > 0); }

  set(choices, name, on) {
    choices.set(name, on);
    this.paint();
  }

  // Heading, switches, legend, and the chart in words.
  furnish() {
    const { chart, key } = this;
    this.heading.textContent = chart.title;
    this.note.textContent = chart.note;
    const axes = [["y", chart.log_y_switch], ["x", chart.log_x_switch]].filter(([, offered]) => offered);
    const buttons = axes.map(([axis]) => toggle(`log ${axis}`, this.log(axis), `${key} log ${axis}`,
      (on) => this.set(state.logarithmic, `${key} ${axis}`, on)));
    const scattered = chart.series.some((series) => series.trend.length);
    if (scattered) buttons.unshift(toggle("smooth", this.smooth(), `${key} smooth`, (on) => this.set(state.smooth, key, on)));
    fill(this.switches, buttons);
    const own = this.sharedLegend || chart.series.length < 2 ? [] : chart.series;
    fill(this.legend, own.map((series) => legendEntry(series, this.scope, () => this.paint())));
    const ends = chart.series.slice(0, ROWS).filter((series) => this.through(series).length).map((series) => {
      const points = this.through(series), a = points[0], b = points[points.length - 1];
      return `${series.name}: ${this.value(a[1])} at ${this.place(a[0])}, ${this.value(b[1])} at ${this.place(b[0])}`;
    });
    this.svg.setAttribute("aria-label", `${chart.title} by ${chart.x_label}. ${chart.note} ${ends.join("; ")}. Arrow keys tell single values.`);
  }

  layout(width) {
    const { chart } = this, series = this.shown();
    const points = series.flatMap((one) => (this.hidesPoints(one) ? one.trend : one.points));
    const xs = [...series.flatMap((one) => one.points.map((p) => p[0])), ...chart.crosses.map((cross) => cross.at)];
    const ys = [...points.flatMap((p) => p.slice(1)), ...chart.levels.map((level) => level.at)];
    const [low, high] = extent(ys), few = Math.max(3, Math.floor(width / 70));
    const single = chart.series.some((one) => one.notes.length);
    const grounded = !this.log("y") && low > 0 && low < 0.6 * high;
    const across = chart.categories.length ? [-0.5, chart.categories.length - 0.5]
      : [...xs, ...chart.band, ...chart.marks.map((mark) => mark.at)];
    const x = scaleOf(across, this.log("x"), LEFT, width - RIGHT, few, single ? 0.06 : 0);
    const y = scaleOf(chart.percent ? [0, 1] : grounded ? [0, ...ys] : ys, this.log("y"), HEIGHT - BOTTOM, TOP, 5, 0.04);
    const exact = [...new Set(xs)].sort((a, b) => a - b);
    if (chart.categories.length) x.ticks = chart.categories.map((_, i) => i);
    else if (single && exact.length <= few) x.ticks = keepingApart(exact, x);
    else if (chart.x_label === "update") x.ticks = x.ticks.filter((tick) => Number.isInteger(tick));
    const crowded = series.reduce((sum, one) => sum + one.points.length, 0) > 3 * FEW;
    return { x, y, series, exact, width, crowded };
  }

  paint() {
    this.furnish();
    const { chart } = this, width = Math.max(240, this.plot.clientWidth || 480), parts = [];
    this.drawn = this.layout(width);
    const { x, y, series } = this.drawn;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const tick = (px, py, anchor, text) => parts.push(make("text", { class: "tick", x: px, y: py, "text-anchor": anchor }, text));
    for (const at of y.ticks) {
      parts.push(make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y.at(at), y2: y.at(at) }));
      tick(LEFT - 8, y.at(at) + 4, "end", chart.percent ? `${Math.round(100 * at)} %` : number(at, TICK_DIGITS));
    }
    const names = fitted(chart.categories, x.at(1) - x.at(0));
    for (const at of x.ticks) {
      parts.push(make("line", { class: "grid", x1: x.at(at), x2: x.at(at), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
      tick(x.at(at), HEIGHT - BOTTOM + 17, "middle", names.length ? names[at] : number(at, TICK_DIGITS));
    }
    tick(width - RIGHT, HEIGHT - 4, "end", chart.x_label);
    const [lines, captions] = this.surroundings(), drawn = series.map((one) => this.line(one));
    const points = chart.series.some((one) => one.notes.length); // of which a caption must hide none
    parts.push(...lines, ...(points ? [...captions, ...drawn] : [...drawn, ...captions]), ...this.crosses());
    fill(this.svg, parts);
    if (this.cursor !== null) this.point(this.cursor);
  }

  surroundings() {
    const { x, y, width } = this.drawn, parts = [], names = [], { band, levels, marks } = this.chart;
    if (band.length) {
      const [a, b] = extent(band.map(x.at));
      parts.push(make("rect", { class: "band", x: a, y: TOP, width: b - a, height: HEIGHT - TOP - BOTTOM }));
    }
    for (const level of levels.filter((one) => !this.log("y") || one.at > 0)) {
      const at = y.at(level.at);
      parts.push(make("line", { class: "level", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      names.push(make("text", { class: "tick halo", ...this.besideLevel(at, level.name) }, level.name));
    }
    for (const mark of marks) {
      const at = x.at(mark.at), left = at > width / 2;
      parts.push(make("line", { class: "level", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
      names.push(make("text", { class: "tick halo", x: at + (left ? -5 : 5), y: TOP + 10, "text-anchor": left ? "end" : "start" }, mark.name));
    }
    return [parts, names];
  }

  // Where the name of a level is written: above its right end; among candidates, nearest to it where it lies under none.
  besideLevel(at, name) {
    const { series, width } = this.drawn, wide = CHARACTER * name.length;
    const ends = [["end", width - RIGHT, width - RIGHT - wide, width], ["start", LEFT, 0, LEFT + wide]];
    const places = ends.flatMap(([anchor, x, from, to]) => {
      const [top, bottom] = extent([at, ...series.flatMap((one) => (one.notes.length ? this.reach(one, from, to) : []))]);
      return [{ x, y: top - 5, "text-anchor": anchor }, { x, y: bottom + 13, "text-anchor": anchor }];
    });
    const inside = places.filter((place) => place.y >= TOP + 8 && place.y <= HEIGHT - BOTTOM - 3);
    return nearest(inside.length ? inside : places, (place) => Math.abs(place.y - at));
  }

  // The heights at which a row of candidates is drawn between two places: its dots, their bars, and the line through them.
  reach(series, from, to) {
    const { x, y } = this.drawn, r = 6, dots = series.points.filter((p) => this.usable(p)), heights = [];
    for (const p of dots) {
      const at = x.at(p[0]);
      if (at >= from - r && at <= to + r) heights.push(y.at(p[1]) - r, y.at(p[1]) + r, ...p.slice(2).map(y.at));
    }
    const line = this.through(series).filter((p) => this.usable(p)).map((p) => [x.at(p[0]), y.at(p[1])]);
    for (let i = 1; i < line.length; i++) {
      const [[a, left], [b, right]] = [line[i - 1], line[i]], ends = [Math.max(a, from), Math.min(b, to)];
      if (a < b && ends[0] < ends[1]) heights.push(...ends.map((end) => left + ((end - a) / (b - a)) * (right - left)));
    }
    return heights;
  }

  line(series) {
    const { x, y, crowded } = this.drawn, points = series.points.map((p, i) => [p, series.colours[i] ?? series.colour]);
    const drawable = points.filter(([p]) => this.usable(p)), trend = this.trendOf(series).filter((p) => this.usable(p));
    const kind = !series.notes.length ? "series" : this.chart.series.length > 1 ? "series single several" : "series single";
    const group = make("g", { class: kind, "data-series": series.id });
    const draw = (some, kind) => {
      const d = some.map((p, i) => `${i ? "L" : "M"}${x.at(p[0]).toFixed(1)} ${y.at(p[1]).toFixed(1)}`).join("");
      group.append(make("path", { class: `${kind} dash${series.dash}`, colour: series.colour, d }));
    };
    const through = this.through(series), single = series.notes.length > 0;
    if (!this.hidesPoints(series)) draw(through.filter((p) => this.usable(p)), trend.length ? "line behind" : "line");
    if (trend.length) draw(trend, "line");
    if (through.length > FEW || (crowded && !single)) return group;
    for (const [p, colour] of drawable) {
      const at = x.at(p[0]);
      if (p.length > 2) {
        const [low, high] = p.slice(2).map((end) => y.at(this.log("y") ? Math.max(end, p[1] / 1e3) : end));
        group.append(make("path", { class: "bar", colour, d: `M${at - 4} ${low}h8m-4 0V${high}m-4 0h8` }));
      }
      const kind = series.hollow.includes(p[0]) ? "dot hollow" : "dot", r = !single ? 3 : p.length > 2 ? 5 : 2;
      if (p.length > 2 || single || points.length < 3) group.append(make("circle", { class: kind, colour, cx: at, cy: y.at(p[1]), r }));
    }
    return group;
  }

  crosses() {
    const { x } = this.drawn, bottom = HEIGHT - BOTTOM - 11;
    return this.chart.crosses.map(({ at }) => make("path", { class: "cross", d: `M${x.at(at) - 5} ${bottom}l10 10m0 -10l-10 10` }));
  }

  // The points of a line at a place; a long line, which was thinned, may have its own beside it.
  pointsAt(one, at) {
    const { x } = this.drawn, far = (p) => Math.abs(x.at(p[0]) - x.at(at));
    const there = one.points.filter((p) => p[0] === at);
    const close = there.length || one.points.length <= FEW ? there : [nearest(one.points, far)].filter((p) => far(p) < 4);
    return close.map((p) => {
      const i = one.points.indexOf(p);
      return { one, p, colour: one.colours[i] ?? one.colour, note: one.notes[i] };
    });
  }

  // Tells what is at one place: the value of every line that has one there.
  point(at) {
    const { x, y, series, width } = this.drawn;
    this.cursor = at;
    const rows = series.flatMap((one) => this.pointsAt(one, at)).sort((a, b) => b.p[1] - a.p[1]);
    const dots = rows.filter(({ one, p }) => this.usable(p) && !this.hidesPoints(one)).map(({ p, colour }) =>
      make("circle", { class: "dot", colour, cx: x.at(p[0]), cy: y.at(p[1]), r: 4.5 }));
    this.svg.querySelector(".cursor")?.remove();
    this.svg.append(make("g", { class: "cursor" }, make("line", { x1: x.at(at), x2: x.at(at), y1: TOP, y2: HEIGHT - BOTTOM }), ...dots));
    const missing = this.chart.crosses.filter((cross) => cross.at === at).map((cross) => make("div", {}, `✕ ${cross.name}`));
    fill(this.tip, [make("div", { class: "place" }, this.place(at)), ...rows.slice(0, ROWS).map((row) => this.tipRow(row)), ...missing]);
    this.tip.hidden = false;
    const left = x.at(at) * (this.plot.clientWidth / width), over = left > this.plot.clientWidth / 2;
    this.tip.style.left = over ? "" : `${left + 14}px`;
    this.tip.style.right = over ? `${this.plot.clientWidth - left + 14}px` : "";
  }

  tipRow({ one, p, colour, note }) {
    const range = p.length > 2 ? make("small", {}, ` ${percentage(p[2])} to ${percentage(p[3])}`) : null;
    const beside = p[0] === this.cursor ? "" : ` at ${number(p[0])}`;
    const name = (note ?? (this.chart.series.length > 1 ? one.name : "")) + beside;
    return make("div", {}, make("span", { class: "swatch", colour }), make("b", {}, this.value(p[1])), ` ${name}`, range);
  }

  leave() {
    this.cursor = null;
    this.tip.hidden = true;
    this.svg.querySelector(".cursor")?.remove();
  }

  follow(event) {
    const box = this.svg.getBoundingClientRect(), { x, exact, width } = this.drawn;
    const at = (event.clientX - box.left) * (width / box.width);
    if (exact.length) this.point(nearest(exact, (value) => Math.abs(x.at(value) - at)));
  }

  walk(event) {
    const { exact } = this.drawn, i = exact.indexOf(this.cursor), last = exact.length - 1;
    const to = { ArrowRight: i + 1, ArrowLeft: i < 0 ? last : i - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.leave();
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.point(exact[Math.min(last, Math.max(0, to))]);
  }
}
