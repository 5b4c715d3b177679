// The live dashboard: reads the server's metrics each second while it is shown.

import { parse, quantile } from "./prometheus.js";
import { ask } from "./server.js";

const INTERVAL_MS = 1000;
const HISTORY = 60; // readings
const RATE_S = 5; // that a rate is taken over

const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(0)} %`);
const whole = (number) => number.toFixed(0);

// What each tile shows of the readings: title, value of one reading or between two, text.
const TILES = [
  ["Running", (now) => now.value("vllm:num_requests_running"), whole],
  ["Waiting", (now) => now.value("vllm:num_requests_waiting"), whole],
  ["KV cache in use", (now) => now.mean("vllm:kv_cache_usage_perc"), percent],
  ["Tokens per second", (now, then) => rate(now, then, "vllm:generation_tokens_total"), whole],
  ["Prompt tokens per second", (now, then) => rate(now, then, "vllm:prompt_tokens_total"), whole],
  ["Prefix cache hits", (now, then) => share(now, then, "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), percent],
];

const LATENCIES = [
  ["Time to first token", "vllm:time_to_first_token_seconds_bucket"],
  ["Between two tokens", "vllm:inter_token_latency_seconds_bucket"],
  ["Whole request", "vllm:e2e_request_latency_seconds_bucket"],
  ["In the queue", "vllm:request_queue_time_seconds_bucket"],
];

class Reading {
  constructor(text) {
    this.time = performance.now() / 1000;
    Object.assign(this, parse(text));
  }

  value(name) {
    return this.values.get(name) ?? 0;
  }

  /** Over all servers. */
  mean(name) {
    return this.value(name) / (this.counts.get(name) ?? 1);
  }
}

function rate(now, then, name) {
  return now.time > then.time ? (now.value(name) - then.value(name)) / (now.time - then.time) : 0;
}

function share(now, then, part, whole) {
  const total = now.value(whole) - then.value(whole);
  return total > 0 ? (now.value(part) - then.value(part)) / total : null;
}

class Tile {
  constructor(title, measure, text) {
    this.measure = measure;
    this.text = text;
    this.history = [];
    this.element = document.createElement("div");
    this.element.className = "tile";
    this.element.innerHTML = `<h3></h3><output></output>
      <svg viewBox="0 0 ${HISTORY - 1} 100" preserveAspectRatio="none" aria-hidden="true"><polyline/></svg>`;
    this.element.querySelector("h3").textContent = title;
  }

  show(now, then) {
    const value = this.measure(now, then);
    this.element.querySelector("output").textContent = this.text(value);
    this.history = [...this.history, value ?? 0].slice(-HISTORY);
    const top = Math.max(...this.history) || 1;
    const start = HISTORY - this.history.length;
    const points = this.history.map((each, place) => `${start + place},${97 - (94 * each) / top}`);
    this.element.querySelector("polyline").setAttribute("points", points.join(" "));
  }
}

function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`;
}

function showLatencies(now, then) {
  const rows = LATENCIES.map(([title, name]) => {
    const after = now.buckets.get(name) ?? new Map([[Infinity, 0]]);
    const before = then.buckets.get(name);
    const row = document.createElement("tr");
    row.innerHTML = `<th scope="row"></th>${"<td></td>".repeat(3)}`;
    row.cells[0].textContent = title;
    for (const [place, q] of [0.5, 0.9, 0.99].entries()) {
      row.cells[place + 1].textContent = seconds(quantile(q, after, before));
    }
    return row;
  });
  document.querySelector("#latency tbody").replaceChildren(...rows);
}

export async function startDashboard(panel) {
  const tiles = TILES.map((tile) => new Tile(...tile));
  document.getElementById("tiles").append(...tiles.map((tile) => tile.element));
  let readings = [];
  for (;;) {
    if (!panel.hidden && !document.hidden) {
      try {
        readings = [...readings, new Reading(await (await ask("metrics")).text())].slice(-HISTORY);
        const now = readings.at(-1);
        const recent = readings.find((each) => now.time - each.time <= RATE_S);
        for (const tile of tiles) tile.show(now, recent);
        showLatencies(now, readings[0]);
      } catch {
        readings = []; // the header says that the server does not answer
      }
    }
    await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
  }
}
