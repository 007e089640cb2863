"use strict";
(() => {
  // --- what there is to draw ------------------------------------------------------------------------------------------

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

  // Each by itself, with its bucket's number where there is room.
  function numberedBars(context, spans, y, height, colour) {
    let last = -1;
    for (let i = firstEndingAfter(spans, view.from); i < spans.length && spans[i].start < view.to; i++) {
      const x = Math.max(view.gutter, toX(spans[i].start));
      const end = Math.min(view.width, toX(spans[i].end));
      if (end < last + 0.4) continue;
      const width = Math.max(0.75, end - x - (end - x > 3 ? 0.75 : 0));
      last = x + width;
      context.fillStyle = colour;
      if (width < 6) {
        context.fillRect(x, y, width, height);
        continue;
      }
      context.beginPath();
      context.roundRect(x, y, width, height, 2);
      context.fill();
      if (spans[i].bucket < 0 || width < 15) continue;
      context.fillStyle = colours["on-bar"];
      context.fillText(spans[i].bucket, x + 4, y + height / 2 + 0.5, width - 5);
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
        if (isOpen) numberedBars(context, spans, top + place * track, track - 2, colour);
        else bars(context, spans, top, track, colour);
      });
      for (let place = 0; place < (isOpen ? tracks[lane] : 1); place++) {
        const parts = isOpen ? rank.parts[lane].filter((piece) => piece.track === place) : rank.parts[lane];
        bars(context, parts, top + place * track, track - (isOpen ? 2 : 0), colours.exposed, { least: 1 });
      }
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
      context.fillRect(x, 4, 1, view.height);
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
})();
