// Numbers as text, and axes: from values to places on the drawing, with ticks at round numbers.

const CHARACTER = 8; // pixels that a letter of a tick takes
const DECADES = 1e6; // a logarithmic axis goes no further down: what is smaller lies at its foot

const shorter = (text) => text.replace(/\.?0+($|e)/, "$1").replace(/e\+?(-?)0*/, "e$1");
const percentage = (value) => `${(100 * value).toFixed(1)} %`;

function number(value, digits = 6) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return shorter(value.toExponential(digits - 1));
  const text = value.toPrecision(Math.max(digits, Math.floor(Math.log10(size)) + 1));
  return text.includes(".") ? shorter(text) : String(Math.round(value));
}

// Names side by side, each in so much room: what all begin with is left out, and what is still too long is cut.
function fitted(names, room) {
  const most = Math.max(2, Math.floor(room / CHARACTER)), [first = ""] = names;
  if (names.every((name) => name.length <= most)) return names;
  const apart = first.split("").findIndex((letter, i) => names.some((name) => name[i] !== letter));
  const own = apart > 1 ? names.map((name) => `…${name.slice(apart)}`) : names;
  return own.map((name) => (name.length > most ? `${name.slice(0, most - 1)}…` : name));
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}

const nearest = (values, distance) => values.reduce((a, b) => (distance(b) < distance(a) ? b : a));

function linearScale(low, high, from, to, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return { at: (value) => from + ((value - low) / (high - low)) * (to - from), ticks };
}

function logScale(low, high, from, to) {
  const a = Math.log10(low), b = Math.log10(high), ticks = [], sparse = Math.ceil((b - a) / 6);
  const factors = b - a < 1.5 ? [1, 2, 5] : [1];
  for (let power = Math.floor(a); power <= b; power++)
    for (const factor of factors) {
      const tick = Number(`${factor}e${power}`);
      if (tick >= low && tick <= high && power % sparse === 0) ticks.push(tick);
    }
  return { at: (value) => from + ((Math.log10(Math.max(value, low)) - a) / (b - a)) * (to - from), ticks };
}

function scaleOf(values, logarithmic, from, to, wanted, around) {
  let [low, high] = extent(logarithmic ? values.filter((value) => value > 0) : values);
  if (low > high) [low, high] = logarithmic ? [0.1, 1] : [0, 1];
  if (logarithmic) {
    low = Math.max(low, high / DECADES);
    const room = Math.max(1.1, (high / low) ** 0.06);
    return logScale(low / room, high * room, from, to);
  }
  const room = high > low ? (high - low) * around : Math.abs(high) * 0.1 || 1;
  return linearScale(low - room, high + room, from, to, wanted);
}
