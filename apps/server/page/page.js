// The page of `morphkv serve`: a chat, and beside it what the chat's slot still holds.
// Text of the model, the server or the user goes into text nodes only, never into markup.

const LOOK_MS = 500;  // between two looks at the slots while an answer comes
const IDLE_LOOK_MS = 2000;
const LOOKS_PER_PICTURE = 2;
const MOST_TOKENS = 4000;  // of the picture
const MOST_SAMPLES = 600;  // of the plots
const SHARES = [0.1, 0.25, 0.5, 0.75];  // of the heads, where a darker shade begins
const MIB = 1 << 20;

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat('en', {maximumFractionDigits: 1});
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function make(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// --- Server -----------------------------------------------------------------------------------

class Refusal extends Error {}  // the server said no

async function refusal(response) {
  const body = await response.text();
  let message = body || response.statusText;
  try {
    const {error} = JSON.parse(body);
    message = error?.message ?? error ?? body;
  } catch {
    // Not JSON: shown as it is.
  }
  const wait = response.headers.get('Retry-After');
  return new Refusal(`${response.status}: ${String(message).slice(0, 1000)}` +
      (wait ? ` (try again in ${wait} s)` : ''));
}

// A good response, or throws.
async function ask(path, options = {}) {
  const headers = {...options.headers};
  if ($('key').value) headers.Authorization = `Bearer ${$('key').value}`;
  let response;
  try {
    response = await fetch(path, {cache: 'no-store', ...options, headers});
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Error(`The server cannot be reached (${error.message}).`);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

const askJson = async (path, options) => (await ask(path, options)).json();

// The data of each server-sent event.
async function* eventsOf(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = '';
  for (;;) {
    const {done, value} = await reader.read();
    rest += done ? decoder.decode() : decoder.decode(value, {stream: true});
    const lines = rest.split('\n');
    rest = done ? '' : lines.pop();
    for (const line of lines) {
      if (line.startsWith('data:')) yield line.slice(5).trim();
    }
    if (done) return;
  }
}

// --- Chat -------------------------------------------------------------------------------------

// slot: null until the server tells it.
const newChat = () => ({messages: [], slot: null, stop: null});
let chat = newChat();
let model = 'default';

function request() {
  const body = {model, messages: [...chat.messages], stream: true,
    stream_options: {include_usage: true}};
  if ($('system').value.trim()) {
    body.messages.unshift({role: 'system', content: $('system').value});
  }
  for (const [id, name] of [['temperature', 'temperature'], ['max-tokens', 'max_tokens'],
      ['budget', 'budget']]) {
    if ($(id).value !== '') body[name] = Number($(id).value);
  }
  if (chat.slot !== null) body.slot = chat.slot;
  return body;
}

// Runs a change of the log that leaves its end in view, if it was.
function inLog(change) {
  const log = $('log');
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function addMessage(role, text) {
  const content = document.createTextNode(text);
  const article = make('article', role, make('h3', '', role === 'user' ? 'You' : 'Model'),
      make('div', 'text', content));
  $('empty').hidden = true;
  inLog(() => $('log').append(article));
  return {article, content};
}

// What the server counted, under an answer.
function footOf(usage, told, reason) {
  const parts = [];
  if (usage) parts.push(`${number.format(usage.completion_tokens)} tokens`);
  if (usage && told) {
    const read = usage.prompt_tokens - told.reused_tokens;
    parts.push(`prompt: ${number.format(read)} read, ${number.format(told.reused_tokens)} reused`);
  }
  if (told) {
    parts.push(`${number.format(told.rows_kept)} of ${number.format(told.tokens_seen)} rows kept`,
        `slot ${told.slot}`);
  }
  if (reason === 'length') parts.push('ended at the most tokens');
  if (reason === 'stopped') parts.push('stopped');
  return parts.join(' · ');
}

// Streams into the message; returns the text's end: {usage, told, reason}.
async function stream(mine, message) {
  const response = await ask('v1/chat/completions', {method: 'POST', signal: mine.stop.signal,
    headers: {'Content-Type': 'application/json'}, body: JSON.stringify(request())});
  const end = {usage: null, told: null, reason: null};
  for await (const data of eventsOf(response.body)) {
    if (data === '[DONE]') return end;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
    const choice = chunk.choices?.[0];
    const piece = choice?.delta?.content;
    if (piece) inLog(() => message.content.appendData(piece));
    end.reason = choice?.finish_reason ?? end.reason;
    end.usage = chunk.usage ?? end.usage;
    if (chunk.morphkv) {
      end.told = chunk.morphkv;
      mine.slot = chunk.morphkv.slot ?? mine.slot;
    }
  }
  if (end.reason === null) throw new Error('The answer broke off.');
  return end;
}

async function send() {
  const input = $('message');
  const text = input.value;
  if (!text.trim() || chat.stop) return;
  const mine = chat;
  mine.stop = new AbortController();
  mine.messages.push({role: 'user', content: text});
  input.value = '';
  fitInput();
  showButtons();
  addMessage('user', text);
  const message = addMessage('assistant', '');
  message.article.setAttribute('aria-busy', 'true');

  let foot = '';
  let problem = '';
  try {
    const answer = stream(mine, message);
    watch();
    const end = await answer;
    foot = footOf(end.usage, end.told, end.reason);
  } catch (error) {
    if (error.name === 'AbortError') {
      foot = footOf(null, null, 'stopped');
    } else {
      problem = error.message;
      if (error instanceof Refusal) mine.slot = null;  // it may be the slot that is refused
    }
  }
  mine.stop = null;
  const answered = message.content.data;
  if (answered) {
    mine.messages.push({role: 'assistant', content: answered});
  } else {
    mine.messages.pop();  // a question without an answer is not part of the chat
  }
  if (mine !== chat) return;
  inLog(() => {
    if (foot) message.article.append(make('p', 'foot', foot));
    if (problem) message.article.append(make('p', 'error', problem));
  });
  message.article.removeAttribute('aria-busy');
  if (problem && !answered && !input.value) {
    input.value = text;
    fitInput();
  }
  showButtons();
  wake();
}

function showButtons() {
  const focused = [$('send'), $('stop')].includes(document.activeElement);
  $('send').hidden = chat.stop !== null;
  $('stop').hidden = chat.stop === null;
  $('send').disabled = !$('message').value.trim();
  if (focused) $('message').focus();  // the focus is not lost with its button
}

function fitInput() {
  const input = $('message');
  input.style.height = 'auto';
  input.style.height = `${input.scrollHeight + 2}px`;
  $('send').disabled = !input.value.trim();
}

function beginChat() {
  chat.stop?.abort();
  chat = newChat();
  $('log').querySelectorAll('article').forEach((article) => article.remove());
  $('empty').hidden = false;
  if ($('slot').value === '') forget();
  showButtons();
  $('message').focus();
}

// --- Picture ----------------------------------------------------------------------------------

// spans: one for each token from `first` on; counts: heads that hold it.
const picture = {first: 0, pieces: [], spans: [], counts: [], levels: [], total: 0, data: null,
  pointed: -1, cursor: 0};

const levelOf = (count, total) =>
  count === 0 ? 0 : 1 + SHARES.filter((share) => count / total >= share).length;

function addToken(piece, position) {
  let className = '';
  if (piece.includes('\n')) className = ' break';
  if (piece === '') className = ' blank';
  const span = make('span', `t h0${className}`, piece);
  span.position = position;
  return span;
}

// Brings the spans in line with the tokens; those that stay are not touched.
function syncTokens(first, pieces) {
  const {spans} = picture;
  let drop = first - picture.first;
  if (drop < 0 || drop > spans.length) drop = spans.length;
  let same = 0;
  while (drop + same < spans.length && same < pieces.length &&
      picture.pieces[drop + same] === pieces[same]) ++same;
  spans.splice(drop + same).forEach((span) => span.remove());
  spans.splice(0, drop).forEach((span) => span.remove());
  picture.levels = picture.levels.slice(drop, drop + same);
  const added = document.createDocumentFragment();
  for (let i = same; i < pieces.length; ++i) {
    spans.push(addToken(pieces[i], first + i));
    picture.levels.push(0);
    added.append(spans[i]);
  }
  $('tokens').append(added);
  picture.first = first;
  picture.pieces = pieces;
}

function shade() {
  const {data, first, spans} = picture;
  const layer = $('layer').value;
  const head = $('head').value;
  picture.counts = new Uint16Array(spans.length);
  picture.total = 0;
  data?.held.forEach((heads, l) => {
    if (layer !== '' && Number(layer) !== l) return;
    heads.forEach((positions, h) => {
      if (head !== '' && Number(head) !== h) return;
      ++picture.total;
      for (const position of positions) {
        if (position >= first) ++picture.counts[position - first];  // none is beyond the end
      }
    });
  });
  picture.counts.forEach((count, i) => {
    const level = levelOf(count, picture.total);
    if (level === picture.levels[i]) return;
    spans[i].classList.replace(`h${picture.levels[i]}`, `h${level}`);
    picture.levels[i] = level;
  });
  showLegend();
  describe();
}

// The counts of heads that share a shade, for as many heads as are chosen.
function showLegend() {
  const {total} = picture;
  const ranges = new Map();
  for (let count = 0; count <= total; ++count) {
    const level = levelOf(count, total);
    ranges.set(level, [ranges.get(level)?.[0] ?? count, count]);
  }
  const labels = [...ranges].map(([level, [least, most]]) =>
    [level, least === most ? String(least) : `${least}–${most}`]);
  if (labels.join() === picture.legend) return;
  picture.legend = labels.join();
  $('legend').replaceChildren(...labels.map(([level, label]) => make('li', `h${level}`, label)));
  setText($('legend-title'), `Held by, of ${total} ${total === 1 ? 'head' : 'heads'}`);
  $('legend-title').parentElement.hidden = total === 0;
}

const visible = (piece) =>
  piece.trim() || (piece.includes('\n') ? 'line break' : piece ? 'space' : 'part of a character');

// Says who holds the token that is pointed at.
function describe() {
  const i = picture.pointed - picture.first;
  if (!(i >= 0 && i < picture.spans.length)) {
    setText($('readout'), picture.spans.length ?
      'Point at a token, or step through them with the arrow keys.' : '');
    return;
  }
  const count = picture.counts[i];
  const where = `“${visible(picture.pieces[i])}” at position ${number.format(picture.pointed)}: `;
  const held = `held by ${count} of ${picture.total} ${picture.total === 1 ? 'head' : 'heads'}`;
  if ($('readout').textContent !== where + held) {
    $('readout').replaceChildren(where, make('b', '', held));
  }
}

// The token with the index becomes the one that Tab reaches. One that has the focus keeps its
// tabindex: without it the focus would be lost.
function moveCursor(i) {
  const {spans} = picture;
  const to = Math.max(0, Math.min(i, spans.length - 1));
  if (to !== picture.cursor) spans[picture.cursor]?.removeAttribute('tabindex');
  picture.cursor = to;
  if (spans[to] && spans[to].tabIndex !== 0) spans[to].tabIndex = 0;
}

// Index of the token above (-1) or below (1).
function nextLine(i, step) {
  const {spans} = picture;
  const top = (at) => spans[at].offsetTop;
  const left = (at) => Math.abs(spans[at].offsetLeft - spans[i].offsetLeft);
  let best = i + step;
  while (spans[best] && top(best) === top(i)) best += step;
  if (!spans[best]) return i;
  for (let at = best; spans[at] && top(at) === top(best); at += step) {
    if (left(at) < left(best)) best = at;
  }
  return best;
}

function stepCursor(event) {
  const i = picture.cursor;
  const to = {ArrowLeft: () => i - 1, ArrowRight: () => i + 1, Home: () => 0,
    End: () => picture.spans.length - 1, ArrowUp: () => nextLine(i, -1),
    ArrowDown: () => nextLine(i, 1)}[event.key];
  if (!to || !picture.spans.length || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  moveCursor(to());
  picture.spans[picture.cursor].focus();
}

function setOptions(select, labels) {
  if (select.options.length - 1 === labels.length &&
      labels.every(([value, text], i) => select.options[i + 1].value === value &&
        select.options[i + 1].text === text)) return;
  const chosen = select.value;
  while (select.options.length > 1) select.remove(1);
  for (const [value, text] of labels) select.add(new Option(text, value));
  select.value = labels.some(([value]) => value === chosen) ? chosen : '';
}

function showPicture(data) {
  const tokens = $('tokens');
  const atEnd = tokens.scrollHeight - tokens.scrollTop - tokens.clientHeight < 40;
  const focused = tokens.contains(document.activeElement);
  $('nothing').hidden = data.pieces.length > 0;
  syncTokens(data.first_token, data.pieces);
  picture.data = data;
  setOptions($('layer'), data.layers.map((layer, i) => [String(i), String(layer)]));
  setOptions($('head'), Array.from({length: data.heads}, (_, i) => [String(i), String(i)]));
  shade();
  const earlier = data.first_token;
  $('earlier').hidden = earlier === 0;
  setText($('earlier'), `${number.format(earlier)} earlier tokens are not shown.`);
  const cursor = picture.spans.findIndex((span) => span.tabIndex === 0);
  moveCursor(cursor < 0 ? 0 : cursor);
  if (focused && !tokens.contains(document.activeElement)) picture.spans[picture.cursor]?.focus();
  if (atEnd) tokens.scrollTop = tokens.scrollHeight;
}

// --- Plots ------------------------------------------------------------------------------------

// One entry for each look: {time, seen, kept, evicted, ...}; time counts only while answers come.
let samples = [];
let lastLook = 0;

function remember(slot) {
  const last = samples.at(-1);
  if (last && slot.tokens_seen < last.seen) samples = [];
  const now = performance.now() / 1000;
  const idle = now - lastLook > 4 * LOOK_MS / 1000;
  const before = samples.at(-1)?.time ?? 0;
  lastLook = now;
  const sample = {
    time: samples.length && !idle ? before + now - (samples.at(-1).now) : before, now,
    seen: slot.tokens_seen, kept: slot.rows_kept, evicted: slot.rows_evicted,
    bytesKept: slot.kv_bytes_kept, bytesFull: slot.kv_bytes_full,
    bytesReserved: slot.kv_bytes_allocated,
    speed: slot.state === 'generating' ? slot.tokens_per_second : null,
  };
  // A slot that has evicted nothing came from nothing, in a straight line.
  if (!samples.length && !sample.evicted && sample.seen) {
    samples.push({...sample, seen: 0, kept: 0, speed: null,
      bytesKept: sample.bytesKept === undefined ? undefined : 0,
      bytesFull: sample.bytesFull === undefined ? undefined : 0});
  }
  if (last?.seen === sample.seen && slot.state === 'idle') return;
  samples.push(sample);
  if (samples.length > MOST_SAMPLES) samples = samples.filter((_, i) => i % 2 === 0);
}

// From 0 in round steps to at least `most`.
function ticksTo(most, wanted) {
  const rough = Math.max(most, 1e-6) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough);
  return Array.from({length: Math.ceil(most / step - 1e-9) + 1}, (_, i) => i * step);
}

function draw(svg, lines, {unit, least = 1}) {
  const width = svg.clientWidth;
  const height = svg.clientHeight;
  if (!width) return;
  const at = (tag, attributes, ...content) => {
    const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...content);
    return element;
  };
  const points = lines.flatMap(([, points]) => points.filter(Boolean));
  const yTicks = ticksTo(Math.max(least, ...points.map(([, y]) => y)), 3);
  const xMax = Math.max(1, ...points.map(([x]) => x));
  const xTicks = ticksTo(xMax, width < 300 ? 3 : 5).filter((tick) => tick <= xMax);
  const left = 8 + 6.5 * Math.max(...yTicks.map((tick) => number.format(tick).length));
  const [right, top, bottom] = [12, 8, 22];
  const x = (value) => left + value / xMax * (width - left - right);
  const y = (value) => height - bottom - value / yTicks.at(-1) * (height - top - bottom);

  const parts = [];
  for (const tick of yTicks) {
    parts.push(at('line', {class: 'grid', x1: left, x2: width - right, y1: y(tick), y2: y(tick)}),
        at('text', {x: left - 6, y: y(tick) + 4, 'text-anchor': 'end'}, number.format(tick)));
  }
  parts.push(at('text', {x: width, y: height - 5, 'text-anchor': 'end'}, unit));
  for (const tick of xTicks) {
    const label = number.format(tick);
    if (x(tick) + 3.5 * label.length > width - 7 * unit.length - 8) continue;  // the unit is there
    parts.push(at('text', {x: x(tick), y: height - 5, 'text-anchor': 'middle'}, label));
  }
  for (const [kind, points] of lines) {
    let run = [];
    for (const point of [...points, null]) {
      if (point) {
        run.push(`${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`);
      } else {
        if (run.length) parts.push(at('polyline', {class: kind, points: run.join(' ')}));
        run = [];
      }
    }
    const end = points.findLast(Boolean);
    if (kind === 'kept' && end) parts.push(at('circle', {cx: x(end[0]), cy: y(end[1]), r: 3}));
  }
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.replaceChildren(...parts);
}

// Rows kept against tokens seen. Between two looks the rows grow with the tokens, then stand.
function rowPoints() {
  const points = [];
  samples.forEach((sample, i) => {
    const before = samples[i - 1];
    if (before && before.evicted === 0 && sample.evicted > 0 && sample.kept > before.kept) {
      points.push([before.seen + sample.kept - before.kept, sample.kept]);
    }
    points.push([sample.seen, sample.kept]);
  });
  return points;
}

function drawPlots() {
  const last = samples.at(-1);
  const seen = last?.seen ?? 0;
  draw($('rows-plot'), [['full', seen ? [[0, 0], [seen, seen]] : []], ['kept', rowPoints()]],
      {unit: 'tokens', least: 10});
  $('rows-plot').setAttribute('aria-label', last ?
    `${number.format(last.kept)} rows per head are kept of ${number.format(seen)} tokens seen; ` +
    `a full cache would hold ${number.format(seen)}.` : 'Nothing was seen yet.');

  const known = (name) => samples.filter((sample) => sample[name] !== undefined);
  $('memory').hidden = !known('bytesKept').length || !known('bytesFull').length;
  $('reserved-key').hidden = $('memory').hidden || !known('bytesReserved').length;
  if (!$('memory').hidden) {
    const line = (name) => known(name).map((sample) => [sample.time, sample[name] / MIB]);
    draw($('memory-plot'), [['full', line('bytesFull')], ['reserved', line('bytesReserved')],
      ['kept', line('bytesKept')]], {unit: 's', least: 0.01});
    $('memory-plot').setAttribute('aria-label',
        `The rows take ${number.format(last.bytesKept / MIB)} MiB; those of a full cache would ` +
        `take ${number.format(last.bytesFull / MIB)} MiB.`);
  }

  const speeds = samples.map(({time, speed}) => speed === null ? null : [time, speed]);
  draw($('speed-plot'), [['kept', speeds]], {unit: 's', least: 1});
  const speed = speeds.findLast(Boolean);
  $('speed-plot').setAttribute('aria-label', speed ?
    `Lately ${number.format(speed[1])} tokens per second.` : 'Nothing was generated yet.');
}

// --- Looking at the slots ---------------------------------------------------------------------

let slots = [];
let watching = false;
let wake = () => {};

const watchedSlot = () => $('slot').value === '' ? chat.slot : Number($('slot').value);
const isBusy = (slot) => slot !== undefined && slot.state !== 'idle';

function forget() {
  samples = [];
  picture.pointed = -1;
  showFacts({tokens_seen: 0, rows_kept: 0, rows_evicted: 0});
  showPicture({pieces: [], first_token: 0, held: [], layers: [], heads: 0});
  setText($('activity'), '');
  drawPlots();
}

function showFacts(slot) {
  setText($('seen'), number.format(slot.tokens_seen));
  setText($('kept'), number.format(slot.rows_kept));
  setText($('evicted'), number.format(slot.rows_evicted));
  setText($('speed'), slot.tokens_per_second ? number.format(slot.tokens_per_second) : '–');
}

function showSlot(slot) {
  remember(slot);
  showFacts(slot);
  drawPlots();
  let doing = slot.state;
  if (slot.state === 'reading') {
    doing += ` ${number.format(slot.prompt_read)} of ${number.format(slot.prompt_tokens)} tokens`;
  }
  setText($('activity'), `slot ${slot.id}: ${doing}` +
      (slot.budget ? `, budget ${number.format(slot.budget)}` : ''));
}

let shown = null;  // slot

async function look(withPicture) {
  try {
    slots = await askJson('slots');
    setOptions($('slot'), slots.map(({id}) => [String(id), String(id)]));
    const slot = slots.find(({id}) => id === watchedSlot());
    if ((slot?.id ?? null) !== shown) {
      shown = slot?.id ?? null;
      forget();
    }
    if (slot) {
      showSlot(slot);
      if (withPicture) {
        const data = await askJson(`slots/${slot.id}/picture?tokens=${MOST_TOKENS}`);
        if (slot.id === watchedSlot()) showPicture(data);
      }
    }
    setText($('problem'), '');
  } catch (error) {
    setText($('problem'), `Slots: ${error.message}`);
  }
}

// Looks again and again while there is something to see, and once more after its end.
async function watch() {
  if (watching) {
    wake();
    return;
  }
  watching = true;
  for (let looks = 0;; ++looks) {
    const active = chat.stop !== null || isBusy(slots.find(({id}) => id === watchedSlot()));
    await look(!active || looks % LOOKS_PER_PICTURE === 0);
    if (!active && !chat.stop && $('slot').value === '') break;
    const woken = new Promise((resolve) => { wake = resolve; });
    await Promise.race([pause(active ? LOOK_MS : IDLE_LOOK_MS), woken]);
    while (document.hidden) await pause(LOOK_MS);
  }
  watching = false;
}

// --- Start ------------------------------------------------------------------------------------

async function nameModel() {
  try {
    const {data} = await askJson('v1/models');
    model = data[0].id;
    setText($('model'), model);
  } catch {
    // The name is only for show; what is wrong will be said with the slots.
  }
}

$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  send();
});
$('message').addEventListener('keydown', (event) => {
  if (event.isComposing) return;
  if (event.key === 'Enter' && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === 'Escape') {
    chat.stop?.abort();
  }
});
$('message').addEventListener('input', fitInput);
$('stop').addEventListener('click', () => chat.stop?.abort());
$('new').addEventListener('click', beginChat);
$('key').addEventListener('change', () => {
  nameModel();
  watch();
});
$('slot').addEventListener('change', watch);
$('layer').addEventListener('change', shade);
$('head').addEventListener('change', shade);

const tokens = $('tokens');
tokens.addEventListener('keydown', stepCursor);
for (const type of ['pointerover', 'focusin', 'click']) {
  tokens.addEventListener(type, ({target}) => {
    if (target.position === undefined) return;
    picture.pointed = target.position;
    if (type !== 'pointerover') moveCursor(target.position - picture.first);
    describe();
  });
}
new ResizeObserver(drawPlots).observe($('picture'));

fitInput();
showLegend();
nameModel();
watch();
