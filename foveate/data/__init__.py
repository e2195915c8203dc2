"""A folder of video files as training samples: `Clips`; the page that says what is read and how is docs/data.md."""

from foveate.data.clips import Batch, Clips, Sample, package_clips, stack
from foveate.video import to_uint8, write_mp4

__all__ = ["Batch", "Clips", "Sample", "package_clips", "stack", "to_uint8", "write_mp4"]
