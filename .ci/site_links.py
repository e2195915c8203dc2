"""A hook of mkdocs: pages link to files of the repository, as a reader of the repository wants; the site has its own.

Pictures among the committed results become files of the site. Any other link out of docs/ becomes the path it names.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

RESULTS = Path("benchmarks/results")


def on_files(files, config):
    for picture in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture.resolve())))
    return files


def on_page_markdown(markdown, **_):
    markdown = re.sub(r"\]\(\.\./benchmarks/results/([\w.]+\.png)\)", r"](results/\1)", markdown)
    return re.sub(r"(?<!!)\[[^\]]*\]\(\.\./([^)#]+)\)", r"`\1`", markdown)
