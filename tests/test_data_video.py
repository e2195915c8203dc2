"""Single files that are not plain: turned, stretched, damaged, oddly timed, in every container."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from foveate.data import Clips
from foveate.video import Clip, decode, pack, probe, unpack

SHAPE = {"frames": 4, "height": 16, "width": 16, "zoom": (1.0,), "split": "all"}
CONTAINERS = {
    "wmv": ("wmv2", "asf", {}),
    "flv": ("flv", "flv", {}),
    "3gp": ("mpeg4", "3gp", {}),
    "m2ts": ("libx264", "mpegts", {}),
    "MTS": ("mpeg2video", "mpegts", {}),
    "mpg": ("mpeg2video", "mpeg", {}),
    "ogv": ("libvpx", "ogg", {}),
    "avi": ("mpeg4", "avi", {"bf": "2"}),
    "MKV": ("libx264", "matroska", {}),
    "webm": ("libvpx-vp9", "webm", {"deadline": "realtime"}),
    "h264": ("libx264", "h264", {}),
    "gif": ("gif", "gif", {}),
    "png": ("apng", "apng", {}),
    "nut": ("ffv1", "nut", {}),
    "no-suffix": ("libx264", "mp4", {}),
}


def picture(number: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Grey 20 + 7 x number, and a corner of its own: white top left, black below it."""
    image = np.full((height, width, 3), 20 + 7 * number, np.uint8)
    image[: height // 3, : width // 4] = 255
    image[height // 3 : 2 * height // 3, : width // 4] = 0
    return image


def film(path: Path, codec="libx264", kind=None, *, frames=30, size=(48, 64), options=None, tune=lambda stream: None,
         times=None, rate=25) -> Path:  # fmt: skip
    with av.open(str(path), "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = size
        stream.pix_fmt = {"gif": "rgb8", "apng": "rgb24"}.get(codec, "yuv420p")
        tune(stream)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def shown(path: Path, size: int | None = None) -> np.ndarray:
    clip = probe(Clip(path.name, path), size)
    frames, present = decode(clip, 0, clip.frames)
    assert present.all()
    assert frames.shape == (clip.frames, clip.height, clip.width, 3)
    return frames


@pytest.mark.parametrize("suffix", CONTAINERS)
def test_every_container_that_av_opens_is_used(tmp_path, suffix):
    codec, kind, options = CONTAINERS[suffix]
    film(tmp_path / f"a.{suffix}", codec, kind, options=options)
    clips = Clips(tmp_path, **SHAPE)
    assert [(clip.name, clip.frames, clip.fps) for clip in clips.clips] == [(f"a.{suffix}", 30, 25.0)]
    assert clips.skipped == []
    for start, stop in ((0, 30), (17, 21)):
        grey = decode(clips.clips[0], start, stop)[0][:, 2:, -8:].mean((1, 2, 3))
        assert np.abs(grey - (20 + 7 * np.arange(start, stop))).mean() < 3.5


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_the_display_matrix_is_applied(tmp_path, degrees, mirrored):
    path = film(tmp_path / "a.mp4", frames=2, tune=lambda s: s.set_display_rotation(degrees, hflip=mirrored))
    expected = np.rot90(picture(0), degrees // 90)  # both turn counter-clockwise
    expected = expected[:, ::-1] if mirrored else expected
    assert np.abs(shown(path)[0].astype(int) - expected).mean() < 3.5
    small = shown(path, 24)
    assert small.shape[1:3] == ((32, 24) if degrees % 180 else (24, 32))


def test_a_film_turned_by_another_angle_is_skipped(tmp_path):
    film(tmp_path / "a.mp4", tune=lambda s: s.set_display_rotation(30))
    with pytest.raises(ValueError, match="not by a right angle"):
        Clips(tmp_path, **SHAPE)


@pytest.mark.parametrize(
    ("aspect", "turn", "size"), [((2, 1), 0, (48, 128)), ((1, 2), 0, (48, 32)), ((2, 1), 90, (128, 48))]
)
def test_pixels_become_square(tmp_path, aspect, turn, size):
    def tune(stream):
        stream.codec_context.sample_aspect_ratio = Fraction(*aspect)
        if turn:
            stream.set_display_rotation(turn)

    frames = shown(film(tmp_path / "a.mkv" if not turn else tmp_path / "a.mp4", frames=4, tune=tune))
    assert frames.shape[1:3] == size
    height, width = size
    corner = frames[0, -width // 8 :] if turn else frames[0, : height // 4]
    corner = corner[:, : height // 8] if not turn else corner[:, : width // 4]
    assert corner.mean() > 200  # the white corner lies where a player shows it
    clips = Clips(tmp_path, **SHAPE)
    assert abs(clips.clips[0].width / clips.clips[0].height - width / height) < 0.1


def moving(path: Path, codec: str, kind: str, options: dict, frames: int) -> Path:
    """A view that wanders over noise: whatever is decoded from the wrong picture shows."""
    noise = np.random.default_rng(0).integers(0, 255, (15, 20, 3)).repeat(8, 0).repeat(8, 1).astype(np.uint8)
    with av.open(str(path), "w", format=kind) as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.height, stream.width, stream.pix_fmt = 96, 128, "yuv420p"
        for number in range(frames):
            view = np.ascontiguousarray(noise[number % 24 :, number % 32 :][:96, :128])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(view, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("codec", ["libx264", "mpeg2video"])
def test_nothing_is_used_from_a_corrupt_packet_to_the_next_key_frame(tmp_path, codec):
    """A transport stream with a key frame every 20, from whose middle one packet of 188 bytes is lost."""
    options = {"x264-params": "keyint=20:scenecut=0:bframes=2"} if codec == "libx264" else {"g": "20", "bf": "2"}
    path = moving(tmp_path / "a.ts", codec, "mpegts", options, frames=100)
    whole = shown(path)
    data = path.read_bytes()
    middle = next(at for at in range(len(data) // 2 // 188 * 188, len(data), 188) if data[at + 1 : at + 3] == b"\x01\0")
    path.write_bytes(data[:middle] + data[middle + 188 :])
    clip = probe(Clip("a.ts", path))
    assert clip.frames == 100
    hurt = set()
    for start, stop in ((0, 100), (30, 90), (64, 100)):
        frames, present = decode(clip, start, stop)
        error = np.abs(frames.astype(int) - whole[start:stop]).mean((1, 2, 3))
        assert error[present].max() == 0  # no ghost
        hurt |= set((start + np.flatnonzero(~present)).tolist())
    assert 1 <= len(hurt) <= 40
    assert min(hurt) // 20 >= (max(hurt) - 1) // 20 - 1  # up to a key frame, no further
    clips = Clips(tmp_path, **{**SHAPE, "height": 64, "width": 64})
    starts = {clips.sample(step).start for step in range(80)}
    assert all(not hurt & set(range(start, start + 4)) for start in starts)
    assert "cannot be decoded; left out" in clips.skipped[0][1]


def test_a_frame_shown_before_the_damage_but_decoded_from_it_is_not_used(tmp_path):
    """B-frames come out before the P-frame that they lean on, and before its damage is known."""
    options = {"x264-params": "keyint=40:bframes=3:b-adapt=0:scenecut=0:b-pyramid=none"}
    path = moving(tmp_path / "a.mp4", "libx264", "mp4", options, frames=40)
    whole = shown(path)
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    hurt = packets[5]
    assert hurt.pts == sorted(packet.pts for packet in packets)[8]
    assert hurt.pos is not None
    data = bytearray(path.read_bytes())
    middle = hurt.pos + hurt.size // 4
    data[middle : hurt.pos + hurt.size] = np.random.default_rng(1).bytes(hurt.size - hurt.size // 4)
    path.write_bytes(data)
    with av.open(str(path)) as container:
        assert [frame.pts for frame in container.decode(video=0) if frame.is_corrupt] == [hurt.pts]
    clip = probe(Clip("a.mp4", path))
    for start, stop in ((0, 8), (0, 40), (6, 8)):
        frames, present = decode(clip, start, stop)
        assert present.tolist() == [k <= 4 for k in range(start, stop)]
        assert np.array_equal(frames[present], whole[start:stop][present])


def test_films_without_a_key_frame_at_the_start_begin_at_the_first(tmp_path):
    path = moving(tmp_path / "a.ts", "mpeg2video", "mpegts", {"g": "10", "bf": "0", "sc_threshold": "1000000000"}, 30)
    data = path.read_bytes()
    units = [at for at in range(0, len(data), 188) if data[at + 1 : at + 3] == b"A\0"]  # where frames begin
    path.write_bytes(data[: units[0]] + data[units[4] :])
    clips = Clips(tmp_path, **SHAPE)
    _, present = decode(clips.clips[0], 0, clips.clips[0].frames)
    assert present.tolist() == [False] * 6 + [True] * 20


def test_variable_frame_rate_missing_times_and_single_frames(tmp_path):
    times = np.cumsum([0, *np.random.default_rng(0).integers(10, 400, 29)]).tolist()
    path = film(tmp_path / "vfr.mkv", times=times, rate=1000, options={"tune": "zerolatency"})
    clip = probe(Clip("vfr.mkv", path))
    assert unpack(clip.times).tolist() == times
    assert abs(clip.fps - 29 * 1000 / times[-1]) < 0.5
    grey = decode(clip, 11, 19)[0][:, 2:, -8:].mean((1, 2, 3))
    assert np.abs(grey - (20 + 7 * np.arange(11, 19))).max() < 3
    film(tmp_path / "one.mp4", frames=1)
    film(tmp_path / "three.gif", "gif", frames=3)
    clips = Clips(tmp_path, **SHAPE)
    assert dict(clips.skipped) == {
        name: f"too few frames: {n}; needs 4" for name, n in [("one.mp4", 1), ("three.gif", 3)]
    }
    assert len(Clips(tmp_path, **{**SHAPE, "frames": 1}).clips) == 3


def test_times_are_packed_without_loss():
    for times in ([5], [0, 512], list(range(-40, 4000, 40)), [0, 42, 83, 125, 167, 10**15]):
        assert unpack(pack(times)).tolist() == times
    assert pack(range(0, 30 * 512, 512)) == "0 512x29"


def test_what_is_no_film_is_skipped_with_the_reason(tmp_path):
    film(tmp_path / "good.mp4")
    film(tmp_path / "still.png", "png", "image2", frames=1, tune=lambda s: setattr(s, "pix_fmt", "rgb24"))
    film(tmp_path / "still.jpg", "mjpeg", "image2", frames=1, tune=lambda s: setattr(s, "pix_fmt", "yuvj420p"))
    film(tmp_path / "moving.webp", "libwebp_anim", "webp", tune=lambda s: setattr(s, "pix_fmt", "yuva420p"))
    (tmp_path / "list.mkv").write_text("ffconcat version 1.0\nfile good.mp4\n")
    (tmp_path / "weights.xyz").write_bytes(np.random.default_rng(0).bytes(3000))
    clips = Clips(tmp_path, **SHAPE)
    found = dict(clips.skipped)
    assert [clip.name for clip in clips.clips] == ["good.mp4"]
    assert set(found) == {"still.png", "still.jpg", "moving.webp", "list.mkv", "weights.xyz"}
    assert found["still.png"].startswith("no film")
    assert found["still.jpg"].startswith("no film")
    assert "convert it to MP4" in found["moving.webp"]
    assert "concat" in found["list.mkv"]
    assert "Invalid data" in found["weights.xyz"]


def test_a_cover_picture_is_no_film(tmp_path):
    cover = np.frombuffer(film(tmp_path / "c.png", "png", "image2", frames=1,
                               tune=lambda s: setattr(s, "pix_fmt", "rgb24")).read_bytes(), np.uint8)  # fmt: skip
    (tmp_path / "c.png").unlink()
    with av.open(str(tmp_path / "song.m4a"), "w", format="mp4") as container:
        sound = container.add_stream("aac", rate=16000)
        art = container.add_stream("png", rate=1)
        art.height, art.width, art.pix_fmt = 48, 64, "rgb24"
        art.disposition = av.stream.Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        packets = [*sound.encode(frame), *sound.encode()]
        packets += art.encode(av.VideoFrame.from_ndarray(picture(0), format="rgb24")) + art.encode()
        container.mux(packets)
    assert len(cover)
    with pytest.raises(ValueError, match=r"song.m4a: no video stream, only a cover picture"):
        Clips(tmp_path, **{**SHAPE, "frames": 1})
