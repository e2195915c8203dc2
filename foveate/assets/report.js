// The report's players: all clips by one clock, or their differences from one of their group.
const GAIN = 8;
const clips = [...document.querySelectorAll(".clips .film")].map((image) => ({ ...image.dataset, ...film(image) }));
const controls = document.querySelector(".controls");

decoded(clips.map(({ image }) => image), () => {
  const show = controls.querySelector("[name=show]");
  for (const clip of clips) {
    clip.image.before(clip.canvas);
    clip.pen = clip.canvas.getContext("2d", { willReadFrequently: true });
  }

  function draw(frame) {
    for (const clip of clips) paint(clip.pen, clip, frame);
    if (show.value === "") return;
    for (const other of clips.filter(({ image }) => image.alt === show.value)) {
      const { width, height, group } = other;
      const base = other.pen.getImageData(0, 0, width, height).data;
      for (const clip of clips)
        if (clip !== other && clip.group === group && clip.width === width && clip.height === height)
          if (!("derived" in clip)) subtract(clip, base);
    }
  }
  function subtract({ pen, width, height }, base) {
    const pixels = pen.getImageData(0, 0, width, height);
    for (let i = 0; i < base.length; i++)
      if (i % 4 < 3) pixels.data[i] = GAIN * Math.abs(pixels.data[i] - base[i]);
    pen.putImageData(pixels, 0, 0);
  }

  const players = player(controls, draw);
  show.onchange = players.show;
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT" || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key !== "d" && event.key !== "D") return;
    show.selectedIndex = (show.selectedIndex + 1) % show.length;
    players.show();
    event.preventDefault();
  });
  document.querySelectorAll(".keys").forEach((line) => { line.hidden = false; });
  players.start(Math.max(...clips.map((clip) => clip.count)));
});
