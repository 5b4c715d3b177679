// Reads the text format of Prometheus.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;

/**
 * Return the sums over all other labels: name -> value, and name -> le -> value of buckets; and how
 * many samples each name has.
 */
export function parse(text) {
  const values = new Map();
  const counts = new Map();
  const buckets = new Map();
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    if (!found) continue;
    const [, name, labels, value] = found;
    const bound = /(?:^|,)le="([^"]+)"/.exec(labels ?? "")?.[1];
    const [sums, key] = bound === undefined ? [values, name] : [bucketsOf(buckets, name), toBound(bound)];
    sums.set(key, (sums.get(key) ?? 0) + Number(value));
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  return { values, buckets, counts };
}

function bucketsOf(buckets, name) {
  if (!buckets.has(name)) buckets.set(name, new Map());
  return buckets.get(name);
}

const toBound = (text) => (text === "+Inf" ? Infinity : Number(text));

/**
 * Return a quantile of what was observed between two readings of a histogram's buckets, by linear
 * interpolation within its bucket; null if nothing was.
 */
export function quantile(q, after, before = new Map()) {
  const bounds = [...after.keys()].sort((a, b) => a - b);
  const counts = bounds.map((bound) => after.get(bound) - (before.get(bound) ?? 0));
  const total = counts.at(-1);
  if (!total) return null;
  const rank = q * total;
  const place = counts.findIndex((count) => count >= rank);
  const [lower, below] = place ? [bounds[place - 1], counts[place - 1]] : [0, 0];
  if (bounds[place] === Infinity) return lower; // at least
  return lower + ((bounds[place] - lower) * (rank - below)) / (counts[place] - below);
}
