"""Hides what looks like keys and passwords in the texts of a payload, which is made to be shared."""

from __future__ import annotations

import re
from typing import Any

KEYS = (  # how keys begin that a service made
    *("sk-", "sk_", "pk-", "pk_", "rk_", "whsec_"),  # OpenAI, Anthropic, Stripe
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "glrt-"),
    *("hf_", "npm_", "pypi-", "dckr_pat_", "gsk_", "xai-", "pplx-", "nvapi-", "r8_", "pcsk_", "lsv2_"),
    *("xoxa-", "xoxb-", "xoxe", "xoxp-", "xoxr-", "xoxs-", "xapp-", "SG.", "lin_api_", "ntn_", "shpat_"),
    *("dop_v1_", "hvs.", "sbp_", "figd_", "glsa_", "tskey-", "sntrys_", "PMAK-", "NRAK-", "AGE-SECRET-KEY-"),
)
PASSWORD = r"[\w-]{0,40}(?:passw(?:or)?d|pwd|passphrase)"
KEY = r"""[\w-]{0,40}(?:secret|token|credentials?
  |(?:api|access|account|secret|private|openai|anthropic|azure|google|gemini)[_-]?key)"""
QUOTE = r"\\{0,9}[\"']"
# Bounds of repeated parts keep the time proportional to the length of a text.
DIGIT = r"(?=[^\s\"'\\$*<>(){}\[\].,;&]{0,99}\d)(?!\d{1,15}\b)"  # sizes and ids are no keys
NAMED = rf"{DIGIT}[^\s\"'\\$*<>(){{}}\[\].,;&]{{8,}}"  # the value of a key
HEADER = rf"authorization{QUOTE}?\s{{0,9}}[=:]\s{{0,9}}{QUOTE}?"
# Words that stand in place of a password: its name, its type, or what it is like
WORD = r"""\w*(?:passw|(?:ed|ing|able|str|text|char|field|type|input|hash|crypt|length|tials?|nal|lid|rect
  |holder|hidden|secret|unset|env|files|compat|complete|default|unknown|number|boolean|bytes)(?![\w-]))"""
CODE = rf"(?!\S{{0,99}}\(|[/\[]|[\w.]{{0,99}}(?:{PASSWORD})\b|[a-zA-Z_]\w*(?:\[|\.[\w.]+[\[,)]))"
SECRET = re.compile(
    rf"""
    -----BEGIN\ [A-Z ]{{0,40}}PRIVATE\ KEY(?:\ BLOCK)?-----(?=[\s\\])
      (?:(?!-----END)[\w+/=:,.\s\\-])*(?:-----END\ [A-Z ]{{0,40}}-----)?
    | (?<=://)[^/\s:@"'<>{{}}$*]{{0,99}}:[^/\s"'<>{{}}$*]{{1,200}}(?=@(?!sha256:))  # user:password of a URL
    | \b(?:{"|".join(map(re.escape, KEYS))})
      (?=[\w.-]{{0,16}}?(?:(?=[a-zA-Z]{{0,9}}\d)[a-zA-Z0-9]{{10}}|[a-zA-Z0-9]{{16}}))[\w.-]{{10,}}
    | \b(?:AKIA|ASIA)[0-9A-Z]{{16}}\b | \bAIza[\w-]{{30,}} | \bya29\.[\w-]{{20,}} | \b1//0[\w-]{{20,}}
    | \b\d{{8,10}}:AA[\w-]{{30,}} | (?<![\w-])(?:key-|dapi)[0-9a-f]{{32}}\b  # Telegram, Mailgun, Databricks
    | \bLS0tLS1CRUdJTi(?!BDRVJUSUZJ|BQVUJMSUMg)[\w+/]{{16,}}={{0,2}}  # base64 of PEM, except certificates
    | \$(?:apr1|[156y]|2[abxy]|argon2i?d?)\${{1,2}}[\w./,=+$-]{{1,80}}\$[\w./+]{{22,}}  # hashes of crypt
    | \{{S?SHA\}}[\w+/]{{27,}}=?
    | (Private-Lines:\s\d{{1,3}})(?=[\s\\rn]{{1,9}}[\w+/]{{16}})(?:(?!Private-)[\w+/=\s\\])+  # PuTTY
    | \beyJhdXRocyI6[\w+/]+={{0,2}}  # logins of Docker
    | \beyJ[\w-]{{10,}}\.[\w-]{{10,}}\.[\w-]*  # JSON Web Tokens
    | (hooks\.slack\.com/\w{{1,20}}/|discord(?:app)?\.com/api/webhooks/\d{{1,30}}/)[\w/-]{{16,}}
    | (?i:({HEADER}(?:bearer|basic|token)\s{{1,9}}))[^\s"'\\*$<{{]{{8,}}
    | (?i:({HEADER})){DIGIT}[^\s"'\\*]{{8,}}
    | (?i:(\bbearer\s{{1,9}})(?=[a-z.~+/=_-]{{0,99}}\d))[\w.~+/=-]{{16,}}
    | (?i:(\bcookie{QUOTE}?\s{{0,9}}:\s{{0,9}}{QUOTE}?))(?=\S{{0,200}}\d)[^\n"'\\]{{16,}}
    | (?i:(\b_?auth{QUOTE}?\s{{0,9}}[:=]\s{{0,9}}{QUOTE}?)){DIGIT}[\w+/-]{{16,}}={{0,2}}
    | ([?&](?:sig|key|X-Amz-Signature)=)[\w%+/=-]{{20,}}
    | (?i:(secret[ _]access[ _]key[^\n]{{0,24}}?[\s:]))[a-zA-Z0-9/+]{{40}}\b
    | (\bcurl\b[^\n]{{0,200}}?\s(?:-u|--user)[\s=]{QUOTE}?[^\s:"']{{1,64}}:)[^\s"'$<{{*]{{3,}}
    | (?i:(--(?:{PASSWORD}|{KEY})\s{{1,9}}{QUOTE}?|\bsshpass\s+-p\s*)){NAMED}
    | (?i:(\blogin\s{{1,9}}\S{{1,99}}\s{{1,9}}password\s{{1,9}}|\bwandb\ login\s))[^\s"'\\$*<>]{{4,}}
    | (?i:(\b{PASSWORD}(?:{QUOTE})?\s{{0,9}}[:=]\s{{0,9}}{QUOTE}))(?:(?!{QUOTE})[^\n<>*]){{4,200}}
    | (\b(?:[A-Z0-9]+_)*
      (?:PASSWORD|PASSWD|SECRET|TOKEN|(?:API|ACCESS|SECRET|PRIVATE|OPENAI|ANTHROPIC)_?KEY)=(?:{QUOTE})?)
      (?!\d{{1,15}}\b|\[)[^\s"'\\$*<>(){{}}&]{{4,}}
    | (\b(?!\w{{0,40}}(?:CACHE|PUBLIC|PRIMARY|SORT|PARTITION|FOREIGN|INDEX)_KEY)(?:[A-Z0-9]+_)+KEY=
      (?:{QUOTE})?)(?=[\w+/=-]{{0,99}}\d)[\w+/=-]{{16,}}
    | (?im:((?:^|\\n)[ \t\#>+-]{{0,40}}(?:\d{{1,6}}(?:[\t→:|]|\\t)[ \t-]{{0,40}})?  # a line of YAML
      [\w.-]{{0,40}}pass(?:w(?:or)?d|phrase)\ ?:[ \t]{{1,9}})
      (?!{WORD}|[|!/])[^\s"'\\$*<>(){{}}\[\].,;&:]{{6,}}(?=[ \t]*(?:\#.*)?(?:$|[\r\\"]))(?!\s*[\])}}]))
    | (?i:(\b{PASSWORD}=)){CODE}[^\s"'\\$*<>{{}}&]{{4,}}
    | (?i:(\b(?:{PASSWORD}|{KEY})(?:{QUOTE})?\s{{0,9}}[:=]\s{{0,9}}(?:{QUOTE})?)){NAMED}
    """,
    re.VERBOSE,
)
# One of these is in the lower case of each text with a secret; to look for them is faster.
SIGNS = (
    *map(str.lower, KEYS),
    *("private key", "://", "akia", "asia", "aiza", "ya29", "1//0", ":aa", "dapi", "eyj", "bearer", "cookie"),
    *("auth", "webhooks", "hooks.slack", "sig=", "x-amz-", "curl", "login", "passw", "pwd", "passphrase"),
    *("secret", "token", "credential", "key", "sshpass", "private-lines", "ls0tls1crudjti", "sha}"),
    *("$apr1$", "$1$", "$5$", "$6$", "$y$", "$2a$", "$2b$", "$2x$", "$2y$", "$argon2"),
)
# Parts of a payload that are hidden already, with their context; and pictures, in which nothing can be found.
HIDDEN = ("text", "excerpts", "picture")
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
