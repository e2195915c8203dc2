// Players: every clip is one picture of its frames, drawn frame by frame on a canvas, all by one clock. The body says
// whether every picture could be shown (data-media), for tests and for the wary.
const clips = [...document.querySelectorAll(".clips figure")].map((figure) => {
  const image = figure.querySelector(".film"), { columns, count, height, width } = image.dataset;
  return { image, columns: +columns, count: +count, height: +height, width: +width, figure };
});
const controls = document.querySelector(".controls");
const part = (name) => controls.querySelector(`[name=${name}]`);
const GAIN = 8;

Promise.all(clips.map(({ image }) => image.decode().catch(() => null))).then(() => {
  const lost = clips.filter(({ image }) => !image.naturalWidth).length;
  document.body.dataset.media = lost ? `${lost} of ${clips.length} failed` : `${clips.length} ok`;
  if (clips.length && !lost) start();
});

function start() {
  const last = Math.max(...clips.map((clip) => clip.count)) - 1;
  const [play, scrub, show, place] = ["play", "frame", "show", "place"].map(part);
  for (const clip of clips) {
    const canvas = Object.assign(document.createElement("canvas"), { width: clip.width, height: clip.height });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", clip.image.alt);
    clip.image.before(canvas);
    clip.pen = canvas.getContext("2d", { willReadFrequently: true });
  }
  let frame = 0, playing = false, began = 0;

  function draw() {
    clips.forEach((clip) => paint(clip, frame));
    const other = show.value === "" ? null : clips[+show.value];
    if (other) {
      const { width, height } = other;
      const base = other.pen.getImageData(0, 0, width, height).data;
      for (const clip of clips)
        if (clip !== other && clip.width === width && clip.height === height && !("derived" in clip.image.dataset))
          subtract(clip, base);
    }
    scrub.value = frame;
    place.value = `${frame + 1} / ${last + 1}`;
    document.body.dataset.frame = frame;
  }
  function paint({ image, pen, columns, count, width, height }, index) {
    const at = Math.min(index, count - 1);
    pen.drawImage(image, (at % columns) * width, Math.floor(at / columns) * height, width, height, 0, 0, width, height);
  }
  function subtract({ pen, width, height }, base) {
    const pixels = pen.getImageData(0, 0, width, height);
    for (let i = 0; i < base.length; i++)
      if (i % 4 < 3) pixels.data[i] = GAIN * Math.abs(pixels.data[i] - base[i]);
    pen.putImageData(pixels, 0, 0);
  }
  function tick(now) {
    if (!playing) return;
    const next = Math.floor(((now - began) / 1000) * controls.dataset.fps) % (last + 1);
    if (next !== frame) { frame = Math.max(0, next); draw(); }
    requestAnimationFrame(tick);
  }
  function set(on) {
    playing = on;
    play.textContent = on ? "Pause" : "Play";
    document.body.dataset.playing = on;
    if (on) { began = performance.now() - (1000 * frame) / controls.dataset.fps; requestAnimationFrame(tick); }
  }
  function go(to) { set(false); frame = Math.min(last, Math.max(0, to)); draw(); }

  play.onclick = () => set(!playing);
  scrub.max = last;
  scrub.oninput = () => go(+scrub.value);
  show.onchange = draw;
  document.addEventListener("keydown", (event) => {
    const typing = ["SELECT", "TEXTAREA"].includes(event.target.tagName) || event.target.type === "text";
    if (typing || event.altKey || event.ctrlKey || event.metaKey) return;
    const to = { ArrowLeft: frame - 1, ArrowRight: frame + 1, Home: 0, End: last }[event.key];
    if (event.key === " ") { if (event.target !== play) set(!playing); else return; }
    else if (event.key === "d" || event.key === "D") {
      show.selectedIndex = (show.selectedIndex + 1) % show.length;
      draw();
    } else if (to !== undefined && event.target !== scrub) go(to);
    else return;
    event.preventDefault();
  });
  controls.hidden = false;
  document.querySelectorAll(".keys").forEach((line) => { line.hidden = false; });
  draw();
  set(!matchMedia("(prefers-reduced-motion: reduce)").matches);
}
