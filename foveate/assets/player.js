// Films (contact sheets of frames) drawn frame by frame, and one clock that moves them: for the report and the blind
// test. The body says whether every picture could be shown (data-media), for tests and for the wary.
function film(image) {
  const { columns, count, height, width } = image.dataset;
  const canvas = Object.assign(document.createElement("canvas"), { width: +width, height: +height });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", image.alt);
  return { image, canvas, columns: +columns, count: +count, height: +height, width: +width };
}

function paint(pen, { image, columns, count, width, height }, index) {
  const at = Math.min(index, count - 1);
  pen.drawImage(image, (at % columns) * width, Math.floor(at / columns) * height, width, height, 0, 0, width, height);
}

// Calls `then` once all pictures are decoded; says so where one is broken, and does not call it.
function decoded(images, then) {
  Promise.all(images.map((image) => image.decode().catch(() => null))).then(() => {
    const lost = images.filter((image) => !image.naturalWidth).length;
    if (images.length && !lost) then();
    document.body.dataset.media = lost ? `${lost} of ${images.length} failed` : `${images.length} ok`;
  });
}

// Play button, scrubber, place and the keys Space, arrows, Home and End of `controls`; `draw` is given the frame.
function player(controls, draw) {
  const [play, scrub, place] = ["play", "frame", "place"].map((name) => controls.querySelector(`[name=${name}]`));
  let frame = 0, last = 0, playing = false, began = 0;

  function show() {
    draw(frame);
    scrub.value = frame;
    place.value = `${frame + 1} / ${last + 1}`;
    document.body.dataset.frame = frame;
  }
  function tick(now) {
    if (!playing) return;
    const next = Math.floor(((now - began) / 1000) * controls.dataset.fps) % (last + 1);
    if (next !== frame) { frame = Math.max(0, next); show(); }
    requestAnimationFrame(tick);
  }
  function set(on) {
    playing = on;
    play.textContent = on ? "Pause" : "Play";
    document.body.dataset.playing = on;
    if (on) { began = performance.now() - (1000 * frame) / controls.dataset.fps; requestAnimationFrame(tick); }
  }
  function go(to) { set(false); frame = Math.min(last, Math.max(0, to)); show(); }
  // From the first frame on, of clips so long; they play unless the reader prefers no motion.
  function start(count) {
    last = count - 1;
    scrub.max = last;
    frame = 0;
    controls.hidden = false;
    show();
    set(!matchMedia("(prefers-reduced-motion: reduce)").matches);
  }

  play.onclick = () => set(!playing);
  scrub.oninput = () => go(+scrub.value);
  document.addEventListener("keydown", (event) => {
    const typing = ["SELECT", "TEXTAREA"].includes(event.target.tagName) || event.target.type === "text";
    if (controls.hidden || typing || event.altKey || event.ctrlKey || event.metaKey) return;
    const to = { ArrowLeft: frame - 1, ArrowRight: frame + 1, Home: 0, End: last }[event.key];
    if (event.key === " " && event.target.tagName !== "BUTTON") set(!playing);
    else if (to !== undefined && event.target !== scrub) go(to);
    else return;
    event.preventDefault();
  });
  return { show, start, stop: () => set(false) };
}
