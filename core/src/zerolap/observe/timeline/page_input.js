// What is pointed at, and moving about; and the first picture.

// --- what is pointed at ---------------------------------------------------------------------------------------------

function boxOf({ rank, span, lane, track }, y) {
  const { compute, track: size, gap, pad, tracks } = sizes(rank);
  const isOpen = opened.has(rank);
  let top = y + pad;
  if (lane > 0) {
    top += compute + gap;
    for (let each = 0; each < lane - 1; each++) top += tracks[each] * size + gap;
    top += isOpen ? track * size : 0;
  }
  const x = Math.max(view.gutter, toX(span.start));
  return { x, width: Math.max(1, Math.min(view.width, toX(span.end)) - x), top, height: lane ? size - (isOpen ? 2 : 0) : compute };
}

function nearest(spans, time, slack) {
  let found = null;
  for (let i = firstEndingAfter(spans, time - slack); i < spans.length && spans[i].start <= time + slack; i++) {
    if (!found || (spans[i].start <= time && spans[i].end >= time)) found = spans[i];
  }
  return found;
}

function find(x, y) {
  if (x < view.gutter || y < AXIS) return null;
  const [time, slack] = [toTime(x), 3 * perPixel()];
  for (const { rank, y: top, height } of rows()) {
    if (y < top || y >= top + height) continue;
    const { compute, track, gap, pad, tracks } = sizes(rank);
    let edge = top + pad + compute + gap / 2;
    if (y < edge) {
      const span = nearest(rank.exposed, time, slack) ?? nearest(rank.held, time, 0) ?? nearest(rank.waits, time, 0) ?? PHASES.map((kind) => nearest(rank.phases[kind], time, 0)).find(Boolean);
      return span ? { rank, span, lane: 0, track: 0 } : null;
    }
    for (let lane = 0; lane < 3; lane++) {
      const bottom = edge + tracks[lane] * track + gap;
      if (y < bottom) {
        const place = opened.has(rank) ? Math.min(tracks[lane] - 1, Math.max(0, Math.floor((y - edge) / track))) : 0;
        const candidates = opened.has(rank) ? [rank.lanes[lane][place] ?? []] : rank.lanes[lane];
        const span = candidates.map((spans) => nearest(spans, time, slack)).find(Boolean);
        return span ? { rank, span, lane: lane + 1, track: place } : null;
      }
      edge = bottom;
    }
    return null;
  }
  return null;
}

const ofBucket = (span) => (span.bucket >= 0 ? ` of bucket ${span.bucket}` : "");

function linesOf({ rank, span }) {
  const lines = [];
  const length = format(span.end - span.start);
  const where = `rank ${rank.rank}` + (span.update ? `, update ${span.update}` : "");
  if (span.isExposed) {
    lines.push(["", `Training waits ${length}`], ["red", `for ${span.kind ? (SAID[span.kind] ?? span.kind) + ofBucket(span) : "communication"}: ${span.name.replaceAll("`", "")}`]);
  } else if (span.kind === "held") {
    lines.push(["", `Training waits ${length}`], ["", "for shards to be updated"]);
  } else {
    const title = (SAID[span.kind] ?? span.kind) + ofBucket(span);
    lines.push(["", `${title[0].toUpperCase()}${title.slice(1)}: ${length}`]);
    if (span.name) lines.push(["", span.kind === "use" ? `by ${span.name}` : `in ${span.name}`]);
  }
  lines.push(["", `${where}; ${format(span.start, 1e3)} to ${format(span.end, 1e3)}`]);
  if (span.bucket >= 0 && buckets[span.bucket]) {
    const [bytes, params, more] = buckets[span.bucket];
    lines.push(["", `${(bytes / 2 ** 20).toFixed(2)} MB: ${params.join(", ")}${more ? ` and ${more} more` : ""}`]);
  }
  if (!span.isExposed && span.bucket >= 0 && data.communication.includes(span.kind)) {
    const open = rank.exposed.filter((piece) => piece.kind === span.kind && piece.bucket === span.bucket && piece.start >= span.start - 1 && piece.end <= span.end + 1);
    const seconds = open.reduce((sum, piece) => sum + piece.end - piece.start, 0);
    lines.push(seconds > 0 ? ["red", `exposed for ${format(seconds)}: ${open[0].name.replaceAll("`", "")}`] : ["", "hidden"]);
    const use = span.kind === "gather" && rank.uses.find((each) => each.bucket === span.bucket && each.start >= span.start);
    if (use && use.start > span.end && use.name) lines.push(["", `first used by ${use.name}, ${format(use.start - span.end)} later`]);
  }
  return lines;
}

function tell(found) {
  told.textContent = found ? linesOf(found).map(([, text]) => text).join("; ") : "";
}

function point(event) {
  const box = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const found = find(x, y);
  if (found?.span !== view.hover?.span) {
    view.hover = found;
    redraw();
  }
  tip.hidden = !found;
  if (!found) return;
  tip.replaceChildren(
    ...linesOf(found).map(([kind, text], place) => {
      const line = document.createElement("div");
      const inner = document.createElement(place ? "span" : "strong");
      inner.className = kind;
      inner.textContent = text;
      line.append(inner);
      return line;
    }),
  );
  const left = Math.min(x + 14, view.width - tip.offsetWidth - 4);
  const below = y + 18;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = (below + tip.offsetHeight < view.height ? below : Math.max(2, y - tip.offsetHeight - 12)) + "px";
}

function forget() {
  tip.hidden = true;
  if (view.hover) {
    view.hover = null;
    redraw();
  }
}

// --- moving about ---------------------------------------------------------------------------------------------------

function visit(piece) {
  const rank = ranks[piece.place];
  opened.add(rank);
  measure();
  const length = Math.max((piece.end - piece.start) * 5, total / 400);
  const middle = (piece.start + piece.end) / 2;
  for (const row of rows()) {
    if (row.rank === rank && (row.y < AXIS || row.y + row.height > view.height)) view.top = Math.max(0, view.top + row.y - AXIS - 8);
  }
  view.hover = { rank, span: piece, lane: 0, track: 0 };
  tell(view.hover);
  show(middle - length / 2, middle + length / 2);
}

function goTo(direction) {
  if (!worth.length) return;
  const now = view.hover?.span.isExposed ? view.hover.span : null;
  let place = now ? worth.indexOf(now) + direction : direction > 0 ? worth.findIndex((piece) => piece.start >= view.from) : worth.findLastIndex((piece) => piece.end <= view.to);
  if (place < 0 || place >= worth.length) place = direction > 0 ? 0 : worth.length - 1;
  visit(worth[place]);
}

const pan = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
const COMMANDS = {
  in: () => zoom(0.5), out: () => zoom(2), fit: () => show(0, total), next: () => goTo(1), previous: () => goTo(-1),
  left: () => pan(-0.2), right: () => pan(0.2), up: () => scroll(-60), down: () => scroll(60),
};
const KEYS = {
  "+": "in", "=": "in", w: "in", "-": "out", s: "out", 0: "fit", Home: "fit", n: "next", p: "previous",
  ArrowLeft: "left", a: "left", ArrowRight: "right", d: "right", ArrowUp: "up", ArrowDown: "down",
};

for (const button of section.querySelectorAll("button")) button.addEventListener("click", () => COMMANDS[button.value]());
canvas.addEventListener("keydown", (event) => {
  const command = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (!command || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  COMMANDS[command]();
});
canvas.addEventListener(
  "wheel",
  (event) => {
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 18 : 1;
    if (event.shiftKey) scroll((event.deltaY || event.deltaX) * unit);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX * unit) / view.width);
    else zoom(Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY * unit * 0.002))), toTime(Math.max(view.gutter, event.offsetX)));
  },
  { passive: false },
);

const fingers = new Map();
let hasMoved = false;
canvas.addEventListener("pointerdown", (event) => {
  fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  hasMoved = false;
});
canvas.addEventListener("pointermove", (event) => {
  const before = fingers.get(event.pointerId);
  if (!before) return point(event);
  const [dx, dy] = [event.clientX - before.x, event.clientY - before.y];
  if (!hasMoved && Math.abs(dx) + Math.abs(dy) < 4) return;
  if (!hasMoved) canvas.setPointerCapture(event.pointerId); // not before: a click must stay one
  hasMoved = true;
  const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
  fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  forget();
  if (others.length) {
    const left = canvas.getBoundingClientRect().left;
    const spread = Math.abs(event.clientX - others[0].x) || 1;
    return zoom(Math.max(0.5, Math.min(2, (Math.abs(before.x - others[0].x) || 1) / spread)), toTime((event.clientX + others[0].x) / 2 - left));
  }
  show(view.from - dx * perPixel(), view.to - dx * perPixel());
  if (event.pointerType === "mouse") scroll(-dy);
});
const lift = (event) => fingers.delete(event.pointerId);
canvas.addEventListener("pointercancel", lift);
canvas.addEventListener("pointerup", (event) => {
  lift(event);
  if (hasMoved) return;
  const box = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  if (x < view.gutter) {
    for (const { rank, y: top, height } of rows()) {
      if (y < AXIS || y < top || y >= top + height) continue;
      if (!opened.delete(rank)) opened.add(rank);
    }
    redraw();
  } else {
    view.hover = find(x, y);
    tell(view.hover);
    redraw();
  }
});
canvas.addEventListener("pointerleave", forget);
canvas.addEventListener("dblclick", (event) => event.offsetX >= view.gutter && zoom(0.35, toTime(event.offsetX)));

let chosenFrom = null;
const overviewTime = (event) => Math.min(1, Math.max(0, (event.offsetX - view.gutter) / (overview.clientWidth - view.gutter))) * total;
overview.addEventListener("pointerdown", (event) => {
  overview.setPointerCapture(event.pointerId);
  chosenFrom = overviewTime(event);
});
overview.addEventListener("pointermove", (event) => {
  if (chosenFrom === null) return;
  const now = overviewTime(event);
  if (Math.abs(now - chosenFrom) > total / 500) show(Math.min(chosenFrom, now), Math.max(chosenFrom, now));
});
overview.addEventListener("pointerup", (event) => {
  const now = overviewTime(event);
  if (chosenFrom !== null && Math.abs(now - chosenFrom) <= total / 500) {
    const half = (view.to - view.from) / 2; // a click moves what is shown there
    show(now - half, now + half);
  }
  chosenFrom = null;
});

for (const row of document.querySelectorAll("tr[data-kind]")) {
  const visitLongest = () => {
    const like = pieces.filter((piece) => piece.kind === row.dataset.kind && piece.bucket === Number(row.dataset.bucket) && piece.name === row.dataset.where);
    const longest = like.reduce((a, b) => (b.end - b.start > a.end - a.start ? b : a), like[0]);
    if (longest) visit(longest);
  };
  row.tabIndex = 0;
  row.addEventListener("click", visitLongest);
  row.addEventListener("keydown", (event) => event.key === "Enter" && visitLongest());
}

section.hidden = false;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe(chart);
addEventListener("resize", redraw);
draw();
drawOverview();
document.documentElement.dataset.painted = performance.now().toFixed(0);
