// The blind test: pairs in an order, and on sides, that are drawn anew for every reader; every answer is kept at once.
const test = document.body.dataset.test, place = `foveate-blind-${test}`;
const named = (name) => document.querySelector(`[name=${name}]`);
const versions = {};
for (const image of document.querySelectorAll(".store .film"))
  ((versions[image.dataset.pair] ??= {})[image.dataset.version] = film(image));
const stages = [...document.querySelectorAll(".stage")];
const [trial, end] = [".trial", ".end"].map((name) => document.querySelector(name));

function shuffled(items) {
  for (let i = items.length - 1; i > 0; i--) {
    const j = crypto.getRandomValues(new Uint32Array(1))[0] % (i + 1);
    [items[i], items[j]] = [items[j], items[i]];
  }
  return items;
}
function fresh() {
  const order = shuffled(Object.keys(versions)).map((pair) => ({ pair, sides: shuffled(["x", "y"]) }));
  return { by: "foveate compare --blind", test, reader: crypto.getRandomValues(new Uint32Array(1))[0].toString(16), order, answers: [] };
}
function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(place));
    if (found?.test === test && found.order.every(({ pair }) => pair in versions)) return found;
  } catch { /* none, or a browser that keeps nothing: the answers can still be saved as a file */ }
  return fresh();
}
let state = kept();
function keep() {
  try { localStorage.setItem(place, JSON.stringify(state)); } catch { /* as above */ }
}

decoded([...document.querySelectorAll(".store .film")], () => {
  let shown = [], began = 0;
  const players = player(document.querySelector(".controls"), (frame) => {
    for (const clip of shown) paint(clip.pen, clip, frame);
  });

  function next() {
    const number = state.answers.length, done = number === state.order.length;
    trial.hidden = done;
    end.hidden = !done;
    document.body.dataset.answered = number;
    if (done) {
      players.stop();
      document.querySelector(".controls").hidden = true;
      named("count").value = `${number} of ${number} answered.`;
      named("text").value = JSON.stringify(state, null, 1);
      named("save").focus();
      return;
    }
    const { pair, sides } = state.order[number];
    document.body.dataset.pair = pair;
    named("progress").value = `${number + 1} of ${state.order.length}`;
    named("back").disabled = number === 0;
    shown = sides.map((side, at) => {
      const clip = versions[pair][side];
      clip.pen ??= clip.canvas.getContext("2d");
      clip.canvas.setAttribute("aria-label", at ? "right" : "left");
      stages[at].replaceChildren(clip.canvas);
      return clip;
    });
    began = performance.now();
    players.start(Math.max(...shown.map((clip) => clip.count)));
  }
  function answer(side) {
    if (trial.hidden) return;
    const { pair, sides } = state.order[state.answers.length];
    const seconds = Math.round((performance.now() - began) / 100) / 10;
    state.answers.push({ pair, left: sides[0], choice: side === null ? "none" : sides[side], seconds });
    keep();
    document.activeElement.blur();
    next();
  }
  function back() {
    if (!state.answers.length) return;
    state.answers.pop();
    keep();
    document.activeElement.blur();
    next();
  }
  function save() {
    const text = JSON.stringify(state, null, 1);
    const link = Object.assign(document.createElement("a"), { download: `answers-${test}-${state.reader}.json` });
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.click();
  }

  const acts = { left: () => answer(0), right: () => answer(1), none: () => answer(null), back, change: back, save };
  for (const [name, act] of Object.entries(acts)) named(name).onclick = act;
  named("again").onclick = () => { state = fresh(); keep(); next(); };
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.repeat || trial.hidden) return;
    const act = { 1: acts.left, 2: acts.right, 0: acts.none, Backspace: back }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  });
  keep();
  next();
});
