"""The file that ``write_page`` writes, without a browser."""

import base64
import gzip
import json
import re
from pathlib import Path

import pytest

from tests.xray.payloads import payload, tree_payload
from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath
from titan_tree.xray.page.render import write_page

PATHS = [TokenPath([1, 2, 3], loss_mask=[0, 1, 1]), TokenPath([1, 2, 4], loss_mask=[0, 1, 1])]


def test_the_file_holds_the_payload_and_loads_nothing(tmp_path: Path) -> None:
    expected = payload([tree_payload("<b>", PATHS, [1.0, 0.0])], name="</script><img src=x>\udcff")
    write_page(expected, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    packed = re.search(r'id="payload">([A-Za-z0-9+/=]+)</script>', page)
    assert packed
    assert json.loads(gzip.decompress(base64.b64decode(packed[1]))) == expected
    assert "<title>&lt;/script&gt;&lt;img src=x&gt;? · titan-tree xray</title>" in page
    assert "default-src 'none'" in page
    assert "form-action 'none'; base-uri 'none'" in page
    assert re.findall(r'(?:src|href)="(?!data:)|@import|url\(|^(?:import|export) ', page, re.MULTILINE) == []
    assert page.count("<script") == page.count("</script>") == 3
    write_page(expected, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^{tmp_path}/file/page.html: cannot be written: Not a directory; "):
        write_page(payload([tree_payload("a", PATHS, [1.0, 0.0])]), tmp_path / "file" / "page.html")
