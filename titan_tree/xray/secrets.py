"""Hides what looks like keys and passwords in the texts of a payload, which is made to be shared."""

from __future__ import annotations

import re
from typing import Any

PASSWORD = r"[\w-]{0,40}(?:passw(?:or)?d|pwd|passphrase)"
KEY = r"[\w-]{0,40}(?:secret|token|credentials?|(?:api|access|secret|private)[_-]?key)"
QUOTE = r"\\*[\"']"
SECRET = re.compile(
    rf"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----[\s\S]*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?<=://)[^/\s:@"'<>{{}}$*]*:[^/\s@"'<>{{}}$*]+(?=@)  # user:password of a URL
    | \b(?:sk|pk|rk|whsec)[-_][\w-]{{16,}}  # OpenAI, Anthropic, Stripe
    | \b(?:gh[opusr]|github_pat|glpat|hf|npm|pypi|xox[abeprs]|gsk|dop_v1|r8|SG)[-_.][\w.-]{{10,}}
    | \b(?:AKIA|ASIA)[0-9A-Z]{{16}}\b  # AWS
    | \bAIza[\w-]{{30,}} | \bya29\.[\w-]{{20,}}  # Google
    | \beyJ[\w-]{{10,}}\.[\w-]{{10,}}\.[\w-]*  # JSON Web Tokens
    | (?i:(authorization{QUOTE}?\s*[=:]\s*{QUOTE}?(?:(?:bearer|basic|token)\s+)?))[^\s"'\\*]{{8,}}
    | (?i:(\bbearer\s+))[\w.~+/=-]{{16,}}
    | (?i:(\b{PASSWORD}(?:{QUOTE})?\s*[:=]\s*{QUOTE}))(?:(?!{QUOTE})[^\n<>*]){{4,200}}
    | (\b(?:[A-Z0-9]+_)*(?:PASSWORD|PASSWD|SECRET|TOKEN|(?:API|ACCESS|SECRET|PRIVATE)_?KEY)=(?:{QUOTE})?)
      [^\s"'\\$*<>(){{}}&]{{4,}}
    | (?i:(\b{PASSWORD}=))(?!\S*\(|/)[^\s"'\\$*<>{{}}&]{{4,}}
    | (?i:(\b(?:{PASSWORD}|{KEY})(?:{QUOTE})?\s*[:=]\s*(?:{QUOTE})?))(?=[^\s"'\\]*\d)
      [^\s"'\\$*<>(){{}}.,;&]{{8,}}
    """,
    re.VERBOSE,
)
# One of these is in the lower case of each text with a secret; to look for them is faster.
SIGNS = (
    *(
        "private key",
        "://",
        "sk-",
        "sk_",
        "pk-",
        "pk_",
        "rk-",
        "rk_",
        "whsec",
        "akia",
        "asia",
        "aiza",
        "ya29",
    ),
    *("gh", "glpat", "hf_", "npm_", "pypi-", "xox", "gsk_", "dop_v1", "r8_", "sg.", "eyj", "bearer"),
    *("authorization", "passw", "pwd", "passphrase", "secret", "token", "credential", "key"),
)
HIDDEN = ("text", "excerpts")  # parts of a payload that are hidden already, with their context
CONTEXT = 256  # tokens around a text that may hold the rest of a secret


class Secrets:
    """Hides secrets in texts.

    Args:
        is_on: whether anything is hidden.

    Attributes:
        hidden: how many places were hidden.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on, self.hidden = is_on, 0

    def text(self, text: str, before: str = "") -> str:
        """Returns ``text`` with ``***`` in place of secrets.

        Args:
            before: the end of what precedes it, in which a secret may begin.
        """
        joined, parts, end = before + text, [], len(before)
        lower = joined.lower()
        if not self.is_on or not any(sign in lower for sign in SIGNS):
            return text
        for found in SECRET.finditer(joined):
            name = next(filter(None, found.groups()), "")
            if found.end() <= end:
                continue
            first = max(found.start() + len(name), len(before))
            parts += [joined[end:first], "***"]
            end = found.end()
            self.hidden += 1
        return "".join([*parts, joined[end:]])

    def payload(self, value: Any) -> Any:
        """Returns a value of JSON with its texts hidden."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return {
                    self.payload(key): item if key in HIDDEN else self.payload(item)
                    for key, item in value.items()
                }
            case list() | tuple():
                if all(type(item) in (int, float) for item in value):  # most of a payload
                    return value
                return type(value)(map(self.payload, value))
        return value
