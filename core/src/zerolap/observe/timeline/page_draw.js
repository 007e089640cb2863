// Drawing: the view, the chart and the strip above it. Nothing here listens to anybody.

// --- where it is drawn ----------------------------------------------------------------------------------------------

const section = document.querySelector(".timeline");
const chart = section.querySelector(".chart");
const canvas = chart.querySelector("canvas");
const overview = section.querySelector(".overview");
const tip = chart.querySelector(".tip");
const told = section.querySelector(".told");
const AXIS = 34;
const view = { from: 0, to: total, top: 0, hover: null, width: 0, height: 0, gutter: 0, isNarrow: false };
const worst = ranks.reduce((a, b) => ((b.hidden ?? 101) < (a.hidden ?? 101) ? b : a));
const opened = new Set(ranks.length <= 4 ? ranks : [worst]);
let colours = {};
let isDue = false;

// From the top of a rank's row: the height of the compute lane, of a track of the others, and of the gaps.
function sizes(rank) {
  if (opened.has(rank)) return { compute: 22, track: 13, gap: 4, pad: 9, tracks: numTracks };
  const small = ranks.length > 16;
  return { compute: small ? 6 : 9, track: small ? 3 : 4, gap: 1, pad: small ? 3 : 5, tracks: [1, 1, 1] };
}

function heightOf(rank) {
  const { compute, track, gap, pad, tracks } = sizes(rank);
  return 2 * pad + compute + tracks.reduce((sum, count) => sum + gap + count * track, 0);
}

function* rows() {
  let y = AXIS - view.top;
  for (const rank of ranks) {
    const height = heightOf(rank);
    yield { rank, y, height };
    y += height;
  }
}

const wholeHeight = () => ranks.reduce((sum, rank) => sum + heightOf(rank), 0);
const perPixel = () => (view.to - view.from) / (view.width - view.gutter);
const toX = (time) => view.gutter + (time - view.from) / perPixel();
const toTime = (x) => view.from + (x - view.gutter) * perPixel();

function show(from, to) {
  const length = Math.min(total, Math.max(4, to - from));
  view.from = Math.min(Math.max(0, from), total - length);
  view.to = view.from + length;
  redraw();
}

function zoom(factor, time = (view.from + view.to) / 2) {
  const length = Math.min(total, Math.max(4, (view.to - view.from) * factor)); // or the place under the pointer would move
  const share = (time - view.from) / (view.to - view.from);
  show(time - share * length, time + (1 - share) * length);
}

function scroll(by) {
  view.top = Math.min(Math.max(0, view.top + by), Math.max(0, wholeHeight() - (view.height - AXIS)));
  redraw();
}

function redraw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
    drawOverview();
  });
}

function fitted(element, height) {
  const ratio = devicePixelRatio || 1;
  const width = element.clientWidth;
  if (element.width !== Math.round(width * ratio) || element.height !== Math.round(height * ratio)) {
    element.width = Math.round(width * ratio);
    element.height = Math.round(height * ratio);
    element.style.height = height + "px";
  }
  const context = element.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function measure() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "wash", "line", "faint", "ink", "quiet", "forward", "backward", "optimizer", "idle", "reduce", "step", "gather", "hidden", "exposed", "on-bar", "sans"]) {
    colours[name] = style.getPropertyValue("--" + name).trim();
  }
  view.width = canvas.clientWidth;
  view.isNarrow = view.width < 560;
  view.gutter = view.isNarrow ? 46 : 136;
  const most = Math.max(300, Math.round(innerHeight * (view.isNarrow ? 0.6 : 0.66)));
  view.height = Math.min(AXIS + wholeHeight() + 1, most);
  view.top = Math.min(view.top, Math.max(0, wholeHeight() - (view.height - AXIS)));
}

// --- drawing --------------------------------------------------------------------------------------------------------

const font = (size, weight = 400) => `${weight} ${size}px ${colours.sans}`;

// Bars less than a pixel apart are drawn as one: more could not be seen, and there may be hundreds of thousands.
function bars(context, spans, y, height, colour, { least = 0.75 } = {}) {
  const [scale, origin, { from, to, gutter, width }] = [1 / perPixel(), view.gutter - view.from / perPixel(), view];
  let [left, right] = [-1, -1];
  context.fillStyle = colour;
  for (let i = firstEndingAfter(spans, from); i < spans.length && spans[i].start < to; i++) {
    const x = Math.max(gutter, origin + spans[i].start * scale);
    const end = Math.min(width, Math.max(x + least, origin + spans[i].end * scale));
    if (x < right + 0.7) {
      if (end > right) right = end;
      continue;
    }
    if (right > left) context.fillRect(left, y, right - left, height);
    [left, right] = [x, end];
  }
  if (right > left) context.fillRect(left, y, right - left, height);
}

// Each by itself.
function singleBars(context, spans, y, height, colour) {
  let last = -1;
  context.fillStyle = colour;
  for (let i = firstEndingAfter(spans, view.from); i < spans.length && spans[i].start < view.to; i++) {
    const x = Math.max(view.gutter, toX(spans[i].start));
    const end = Math.min(view.width, toX(spans[i].end));
    if (end < last + 0.4) continue;
    const width = Math.max(0.75, end - x - (end - x > 3 ? 0.75 : 0));
    last = x + width;
    if (width < 6) {
      context.fillRect(x, y, width, height);
      continue;
    }
    context.beginPath();
    context.roundRect(x, y, width, height, 2);
    context.fill();
  }
}

// The number of each bar's bucket, where there is room. Drawn last: red parts of the bars would hide it.
function numbers(context, spans, y, height) {
  let free = -1; // bars of a track may overlap, if there are too many for tracks of their own
  context.fillStyle = colours["on-bar"];
  for (let i = firstEndingAfter(spans, view.from); i < spans.length && spans[i].start < view.to; i++) {
    const x = Math.max(view.gutter, toX(spans[i].start));
    const width = Math.min(view.width, toX(spans[i].end)) - x;
    if (spans[i].bucket < 0 || width < 15 || x < free) continue;
    context.fillText(spans[i].bucket, x + 4, y + height / 2 + 0.5, width - 5);
    free = x + 4 + context.measureText(spans[i].bucket).width;
  }
}

function drawRank(context, { rank, y, height }) {
  const isOpen = opened.has(rank);
  const { compute, track, gap, pad, tracks } = sizes(rank);
  context.fillStyle = colours.faint;
  context.fillRect(0, y + height - 1, view.width, 1);
  let top = y + pad;
  const laneTops = [top];
  context.save();
  context.beginPath();
  context.rect(view.gutter, y, view.width - view.gutter, height);
  context.clip();
  context.font = font(10, 600);
  context.textBaseline = "middle";
  for (const kind of PHASES) bars(context, rank.phases[kind], top, compute, colours[kind]);
  bars(context, rank.waits, top, compute, colours.idle, { least: 0 });
  bars(context, rank.held, top, compute, colours.step);
  bars(context, rank.exposed, top, compute, colours.exposed, { least: 1 });
  if (isOpen) {
    context.fillStyle = colours.ink;
    for (const span of Object.values(rank.phases).flat()) {
      const [x, end] = [Math.max(view.gutter, toX(span.start)), toX(span.end)];
      if (span.end > view.from && span.start < view.to && end - x > 60) context.fillText(SAID[span.kind] ?? span.kind, x + 6, top + compute / 2 + 0.5);
    }
    for (const span of perPixel() < 400 ? rank.spans : []) { // where gradients were ready, once there is room for it
      if (span.kind === "ready" && span.start > view.from && span.start < view.to) context.fillRect(toX(span.start), top + compute - 5, 1, 5);
    }
  }
  top += compute;
  [colours.reduce, colours.step, colours.gather].forEach((colour, lane) => {
    top += gap;
    laneTops.push(top);
    rank.lanes[lane].forEach((spans, place) => {
      if (isOpen) singleBars(context, spans, top + place * track, track - 2, colour);
      else bars(context, spans, top, track, colour);
    });
    for (let place = 0; place < (isOpen ? tracks[lane] : 1); place++) {
      const parts = isOpen ? rank.parts[lane].filter((piece) => piece.track === place) : rank.parts[lane];
      bars(context, parts, top + place * track, track - (isOpen ? 2 : 0), colours.exposed, { least: 1 });
    }
    if (isOpen) rank.lanes[lane].forEach((spans, place) => numbers(context, spans, top + place * track, track - 2));
    top += tracks[lane] * track;
  });
  if (view.hover && view.hover.rank === rank) {
    const { x, width, top: boxTop, height: boxHeight } = boxOf(view.hover, y);
    context.strokeStyle = colours.ink;
    context.lineWidth = 1.5;
    context.strokeRect(x - 0.75, boxTop - 0.75, width + 1.5, boxHeight + 1.5);
  }
  context.restore();
  drawLabels(context, rank, y, laneTops, compute, track, isOpen);
}

function drawLabels(context, rank, y, laneTops, compute, track, isOpen) {
  const hidden = rank.hidden === null ? "" : Math.floor(rank.hidden) + " %";
  context.textBaseline = "middle";
  context.fillStyle = colours.ink;
  if (!isOpen) {
    context.font = font(11, 600);
    context.fillText(view.isNarrow ? rank.rank : "Rank " + rank.rank, 8, y + heightOf(rank) / 2);
    if (!view.isNarrow) {
      context.font = font(11);
      context.fillStyle = colours.quiet;
      context.textAlign = "right";
      context.fillText(hidden, view.gutter - 10, y + heightOf(rank) / 2);
      context.textAlign = "left";
    }
    return;
  }
  context.font = font(13, 650);
  context.fillText(view.isNarrow ? rank.rank : "Rank " + rank.rank, 8, laneTops[0] + compute / 2 + 0.5);
  context.font = font(11);
  context.fillStyle = colours.quiet;
  context.fillText(hidden + (view.isNarrow ? "" : " hidden"), 8, laneTops[0] + compute + 11);
  if (view.isNarrow) return;
  context.textAlign = "right";
  LANES.forEach((name, lane) => context.fillText(name, view.gutter - 10, laneTops[lane] + (lane ? track - 2 : compute) / 2 + 0.5));
  context.textAlign = "left";
}

function format(micros, unit = micros >= 1e6 ? 1e6 : micros >= 1e3 ? 1e3 : 1) {
  const value = micros / unit;
  return `${value.toFixed(unit === 1 || value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${unit === 1 ? "\u00b5s" : unit === 1e3 ? "ms" : "s"}`;
}

function drawAxis(context) {
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, view.width, AXIS);
  context.font = font(11);
  context.textBaseline = "middle";
  const least = perPixel() * (view.isNarrow ? 70 : 90);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least);
  const unit = step >= 1e6 ? 1e6 : step >= 1e3 || view.to > 1e4 ? 1e3 : 1;
  const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
  for (let time = Math.ceil(view.from / step) * step; time < view.to; time += step) {
    const x = toX(time);
    context.fillStyle = colours.faint;
    context.fillRect(x, AXIS, 1, view.height);
    context.fillStyle = colours.line;
    context.fillRect(x, AXIS - 5, 1, 5);
    context.fillStyle = colours.quiet;
    const text = `${(time / unit).toFixed(digits)} ${unit === 1 ? "\u00b5s" : unit === 1e3 ? "ms" : "s"}`;
    if (x + 4 + context.measureText(text).width < view.width) context.fillText(text, x + 4, 25);
  }
  let free = 0;
  for (const [update, start] of updates) {
    const x = toX(start);
    if (x < view.gutter - 1 || x > view.width) continue;
    context.fillStyle = colours.line;
    context.fillRect(x, 4, 1, 14); // beside its name, and below the axis: through the times it would strike them out
    context.fillRect(x, AXIS, 1, view.height);
    const text = `update ${update}`;
    const width = context.measureText(text).width;
    if (x < free || x + 5 + width > view.width) continue;
    context.fillStyle = colours.ink;
    context.fillText(text, x + 5, 10);
    free = x + width + 14;
  }
  context.fillStyle = colours.line;
  context.fillRect(0, AXIS - 1, view.width, 1);
}

function draw() {
  measure();
  const context = fitted(canvas, view.height);
  drawAxis(context);
  context.save();
  context.beginPath();
  context.rect(0, AXIS, view.width, view.height - AXIS);
  context.clip();
  for (const row of rows()) if (row.y + row.height > AXIS && row.y < view.height) drawRank(context, row);
  const whole = wholeHeight();
  const room = view.height - AXIS;
  if (whole > room) {
    context.fillStyle = colours.line;
    context.fillRect(view.width - 5, AXIS + (view.top / whole) * room, 4, (room / whole) * room);
  }
  context.restore();
  canvas.dataset.from = view.from.toFixed(0);
  canvas.dataset.to = view.to.toFixed(0);
}

// Of all ranks, how many communicate, and how many of those wait, over the whole of the trace.
const density = { width: 0, communicating: [], exposed: [] };
function countColumns(width) {
  if (density.width === width) return;
  const count = (lists) => {
    const columns = new Float64Array(width + 1);
    for (const spans of lists) {
      for (const { start, end } of spans) {
        const [a, b] = [(start / total) * width, Math.min(width, (end / total) * width)];
        for (let column = Math.floor(a); column < b; column++) columns[column] += Math.min(b, column + 1) - Math.max(a, column);
      }
    }
    return columns;
  };
  Object.assign(density, { width, communicating: count(ranks.map((rank) => rank.communicating)), exposed: count(ranks.map((rank) => rank.exposed)) });
}

function drawOverview() {
  const height = 40;
  const context = fitted(overview, height);
  const width = Math.max(1, overview.clientWidth - view.gutter);
  countColumns(width);
  context.fillStyle = colours.wash;
  context.fillRect(view.gutter, 0, width, height);
  for (let column = 0; column < width; column++) {
    const [all, open] = [density.communicating[column], density.exposed[column]].map((each) => Math.min(1, each / ranks.length) * (height - 4));
    context.fillStyle = colours.hidden;
    context.fillRect(view.gutter + column, height - all, 1, all);
    context.fillStyle = colours.exposed;
    context.fillRect(view.gutter + column, height - open, 1, open);
  }
  const [a, b] = [view.gutter + (view.from / total) * width, view.gutter + (view.to / total) * width];
  context.fillStyle = colours.paper;
  context.globalAlpha = 0.72;
  context.fillRect(view.gutter, 0, a - view.gutter, height);
  context.fillRect(b, 0, view.gutter + width - b, height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.ink;
  context.lineWidth = 1;
  context.strokeRect(a + 0.5, 0.5, Math.max(2, b - a - 1), height - 1);
  context.fillStyle = colours.quiet;
  context.font = font(11);
  context.textBaseline = "middle";
  if (!view.isNarrow) {
    context.textAlign = "right";
    context.fillText("whole trace", view.gutter - 10, height / 2);
    context.textAlign = "left";
  }
}
