// What the server's Prometheus metrics say of the last interval.

const NUM_POINTS = 60;
const SAMPLE = /^octavo:(\w+)(?:\{[^}]*\})? (\S+)$/;

// The sum over all labels of each metric.
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = SAMPLE.exec(line);
    if (match) found[match[1]] = (found[match[1]] ?? 0) + Number(match[2]);
  }
  return found;
}

const number = (digits, unit = "") => (value) => `${value.toFixed(digits)}${unit}`;
const rate = (name) => (now, before, seconds) => (now[name] - before[name]) / seconds;
const mean = (name) => (now, before) => {
  const count = now[`${name}_count`] - before[`${name}_count`];
  return count > 0 ? (1000 * (now[`${name}_sum`] - before[`${name}_sum`])) / count : null;
};
const share = (part, whole) => (now, before) => {
  const count = now[whole] - before[whole];
  return count > 0 ? (100 * (now[part] - before[part])) / count : null;
};

// null: nothing happened that it could be told of; the last value stays.
const SHOWN = [
  ["Running", (now) => now.num_requests_running, number(0)],
  ["Waiting", (now) => now.num_requests_waiting, number(0)],
  ["Generated", rate("generation_tokens_total"), number(0, " tok/s")],
  ["Prompts", rate("prompt_tokens_total"), number(0, " tok/s")],
  ["First token", mean("time_to_first_token_seconds"), number(0, " ms")],
  ["A token after it", mean("inter_token_latency_seconds"), number(1, " ms")],
  ["Cache in use", (now) => 100 * now.kv_cache_usage_perc, number(1, " %")],
  ["Prefix hits", share("prefix_cache_hits_total", "prefix_cache_queries_total"), number(0, " %")],
  [
    "Drafts kept",
    share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
    number(0, " %"),
  ],
];

export class Metrics {
  constructor(list) {
    this.before = null;
    this.rows = SHOWN.map(([name, value, format]) => {
      const title = document.createElement("dt");
      title.textContent = name;
      const shown = document.createElement("dd");
      shown.textContent = "–";
      const line = new Sparkline();
      list.append(title, shown, line.element);
      return { value, format, shown, line };
    });
  }

  take(text, time) {
    const now = parse(text);
    const before = this.before;
    this.before = { now, time };
    // Counters never go back: another server has taken this one's place.
    if (!before || now.generation_tokens_total < before.now.generation_tokens_total) return;
    for (const { value, format, shown, line } of this.rows) {
      const found = value(now, before.now, (time - before.time) / 1000);
      if (found === null || Number.isNaN(found)) continue;
      shown.textContent = format(found);
      line.push(found);
    }
  }
}

class Sparkline {
  constructor() {
    const space = "http://www.w3.org/2000/svg";
    this.element = document.createElementNS(space, "svg");
    this.element.setAttribute("viewBox", `0 0 ${NUM_POINTS - 1} 20`);
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("aria-hidden", "true");
    this.line = document.createElementNS(space, "polyline");
    this.element.append(this.line);
    this.values = [];
  }

  push(value) {
    this.values = [...this.values, value].slice(-NUM_POINTS);
    const top = Math.max(...this.values, 1e-9);
    const start = NUM_POINTS - this.values.length;
    const points = this.values.map((one, index) => `${start + index},${19 - (18 * one) / top}`);
    this.line.setAttribute("points", points.join(" "));
  }
}
