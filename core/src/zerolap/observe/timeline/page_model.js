// What there is to draw, from the data in the page. The three scripts of this page are one module.

const data = JSON.parse(document.getElementById("data").textContent);
const { kinds, names, buckets } = data;
const total = Math.max(1, data.seconds * 1e6); // all times are microseconds
const LANES = ["compute", "reduce", "update", "gather"];
const SAID = { step: "update", agree: "agreement", migrate: "move of states", check: "check", use: "first use", optimizer: "step()", blocked: "training waits" };
const PHASES = ["forward", "backward", "optimizer"];
const laneOf = (kind) => (kind === "step" ? 2 : kind === "gather" ? 3 : data.communication.includes(kind) ? 1 : 0);
const MOST_TRACKS = 5;

function spansOf(flat, width) {
  const found = [];
  for (let i = 0; i < flat.length; i += width) {
    const [kind, bucket, start, length, update, name] = flat.slice(i, i + width);
    found.push({ kind: kind < 0 ? "" : kinds[kind], bucket, start, end: start + length, update, name: names[name] });
  }
  return found;
}

// Bars of one lane that overlap get tracks of their own, up to a number; then they share the last one.
function toTracks(spans) {
  const tracks = [];
  for (const span of spans) {
    let place = tracks.findIndex((track) => track.at(-1).end <= span.start);
    if (place < 0 && tracks.length < MOST_TRACKS) place = tracks.push([]) - 1;
    span.track = place < 0 ? MOST_TRACKS - 1 : place;
    tracks[span.track].push(span);
  }
  return tracks;
}

function unionOf(spans) {
  const joined = [];
  for (const { start, end } of spans) {
    const last = joined.at(-1);
    if (last && start <= last.end) last.end = Math.max(last.end, end);
    else joined.push({ start, end });
  }
  return joined;
}

const ranks = data.ranks.map((given, place) => {
  const spans = spansOf(given.spans, 6);
  const exposed = [];
  for (let i = 0; i < given.exposed.length; i += 5) {
    const [kind, bucket, start, length, where] = given.exposed.slice(i, i + 5);
    exposed.push({ kind: kind < 0 ? "" : kinds[kind], bucket, start, end: start + length, name: names[where], isExposed: true, place });
  }
  const held = [];
  for (let i = 0; i < given.held.length; i += 2) held.push({ kind: "held", bucket: -1, start: given.held[i], end: given.held[i] + given.held[i + 1] });
  const lanes = [1, 2, 3].map((lane) => toTracks(spans.filter((span) => laneOf(span.kind) === lane)));
  const uses = spans.filter((span) => span.kind === "use");
  const waits = spans.filter((span) => span.kind === "blocked" || span.kind === "use");
  const phases = Object.fromEntries(PHASES.map((kind) => [kind, spans.filter((span) => span.kind === kind)]));
  const communicating = unionOf(spans.filter((span) => data.communication.includes(span.kind)));
  // The same pieces again on the bars of the collectives they belong to.
  for (const piece of exposed) {
    const tracks = piece.kind ? lanes[laneOf(piece.kind) - 1] : [];
    const bar = tracks.map((track) => at(track, piece.start, piece.end, piece)).find(Boolean);
    piece.lane = bar ? laneOf(piece.kind) : 0;
    piece.track = bar ? bar.track : 0;
  }
  const parts = [1, 2, 3].map((lane) => exposed.filter((piece) => piece.lane === lane));
  return { rank: given.rank, hidden: given.hidden, spans, exposed, held, lanes, uses, waits, phases, communicating, parts };
});

// The span of a track that covers a piece and is of its bucket; tracks are in order of start.
function at(track, start, end, like) {
  for (let i = firstEndingAfter(track, start); i < track.length && track[i].start <= end; i++) {
    if (track[i].bucket === like.bucket && track[i].kind === like.kind && track[i].end > start) return track[i];
  }
  return null;
}

function firstEndingAfter(spans, time) {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].end <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

const pieces = ranks.flatMap((rank) => rank.exposed).sort((a, b) => a.start - b.start);
const longest = pieces.reduce((most, piece) => Math.max(most, piece.end - piece.start), 0);
const worth = pieces.filter((piece) => piece.end - piece.start >= 0.05 * longest); // to be gone through one by one
const numTracks = [0, 1, 2].map((lane) => Math.max(1, ...ranks.map((rank) => rank.lanes[lane].length)));
const updates = new Map(); // when each begins, on the first rank that says so
for (const span of ranks[0].spans) {
  if ((span.kind === "forward" || span.kind === "ready") && !updates.has(span.update)) updates.set(span.update, span.start);
}
