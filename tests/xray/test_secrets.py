"""Secrets: what looks like a key or a password is hidden, also where a segment cuts it. Other text stays."""

import json
import time

from tests.support.cases import for_each
from titan_tree.cli import main
from titan_tree.xray.secrets import Secrets

KEY = "sk-ant-api03-" + "A1b2C3d4" * 4
FOUND = {
    f"export KEY={KEY}": "export KEY=***",
    "https://ada:pa55w0rd77@example.com/x": "https://***@example.com/x",
    "redis://:pa55@h:1": "redis://***@h:1",
    "ghp_abcdefghij0123456789": "***",
    "github_pat_abcdefghij0123456789": "***",
    "glpat-abcdefghij0123456789": "***",
    "hf_abcdefghijklmnopqrst": "***",
    "AKIAIOSFODNN7EXAMPLE": "***",
    "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG": "AWS_SECRET_ACCESS_KEY=***",
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG": "aws_secret_access_key = ***",
    "Authorization: Bearer abc.def-ghi_jkl": "Authorization: Bearer ***",
    "Authorization: Basic YWRhOnBhc3M=": "Authorization: Basic ***",
    "X-Api-Key: abcdef123456": "X-Api-Key: ***",
    "?access_token=abcdef12345&x=1": "?access_token=***&x=1",
    "DB_PASSWORD=hunter": "DB_PASSWORD=***",
    "password: hunter22": "password: ***",
    "password = 'a b c d'": "password = '***'",
    '{\\"password\\": \\"hunter\\"}': '{\\"password\\": \\"***\\"}',
    "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM.abc-def": "***",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- end": "*** end",
    "-----BEGIN PRIVATE KEY-----\nMII": "***",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nlQOY\n-----END PGP PRIVATE KEY BLOCK----- end": "*** end",
    "postgres://ada:p@ss77@db/x": "postgres://***@db/x",
    "https://hooks.slack.com/services/T0AB1/B0AB1/aB3dE5fG7hJ9kL1mN3": "https://hooks.slack.com/services/***",
    "https://discord.com/api/webhooks/12/AbCdEf-GhIjKlMnOpQr": "https://discord.com/api/webhooks/12/***",
    "123456789:AAF1b2C3d4E5f6G7h8I9j0k1L2m3N4o5P6q": "***",
    "hvs.A1b2C3d4E5f6G7h8": "***",
    "key-0123456789abcdef0123456789abcdef": "***",
    "AccountName=a;AccountKey=A1b2C3d4E5f6/+x==;b": "AccountName=a;AccountKey=***;b",
    "https://a/c?sv=2022&sig=A1b2C3d4E5f6G7h8I9j0%3D": "https://a/c?sv=2022&sig=***",
    "Cookie: session=A1b2C3d4E5f6G7h8": "Cookie: ***",
    '"auth": "dXNlcjpwYXNzd29yZDEyMw=="': '"auth": "***"',
    "aws_secret_access_key   wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY": "aws_secret_access_key   ***",
    "curl -s -u ada:hunter22 https://x": "curl -s -u ada:*** https://x",
    "login --token 0123456789abcdef": "login --token ***",
    "sshpass -p hunter22 ssh h": "sshpass -p *** ssh h",
    "machine h\n login a password hunter": "machine h\n login a password ***",
    "Authorization: token abcdefgh": "Authorization: token ***",
    "\n  password: hunterpass\n": "\n  password: ***\n",
    "\n- DB_PASSWORD: correct-horse  # ours\nx": "\n- DB_PASSWORD: ***  # ours\nx",
    "\\n  password: hunterpass\\nuser: ada": "\\n  password: ***\\nuser: ada",
    "\n   12→  password: hunterpass\n": "\n   12→  password: ***\n",
    ".dockerconfigjson: eyJhdXRocyI6eyJnaGNyLmlvIjp7fX19": ".dockerconfigjson: ***",
    "kind: Secret\ndata:\n  password: aHVudGVycGFzcw==\n": "kind: Secret\ndata:\n  password: ***\n",
    f"tls.key: LS0tLS1CRUdJTiBQUklWQVRFIEtFWS0tLS0t{'Q0' * 9}==": "tls.key: ***",
    "ada:$apr1$ZjTqBB3f$IF9gdYAGlMrs2fuINjHsz.": "ada:***",
    f"ada:$2y$05${'c4WoM' * 10}BRq": "ada:***",
    f"$argon2id$v=19$m=65536,t=3,p=4$c29tZXNhbHRzb21l${'Rdesc' * 8}": "***",
    "ada:{SHA}VBPuJHI7uixaa6LQGWx4s+5GKNE=": "ada:***",
    f"Private-Lines: 1\r\n{'AAAAIEqw' * 4}\r\nPrivate-MAC: 5b": "Private-Lines: 1***Private-MAC: 5b",
    "OPENAI_KEY=hunterhunter": "OPENAI_KEY=***",
    "TAVILY_KEY=q1w2e3r4t5y6u7i8": "TAVILY_KEY=***",
    '{"azure_openai_key": "qwerty12asdf"}': '{"azure_openai_key": "***"}',
}
PLAIN = (
    *('class="sk-estimator-doc-link"', "pk_order_items_composite", "npm_config_registry_url"),
    *("import hf_hub_download", "hf_model_path_or_name", "pypi-server-proxy-cache"),
    *("authorization: required", "Authorization: Bearer $OPENAI_API_KEY", "Authorization: Bearer ${TOKEN}"),
    *("connect(password=password)", "password=settings.DB_PASSWORD,", "password=os.environ['DB']"),
    *("token = token_list[0]", "token = parts[1].strip()", "EOS_TOKEN=50256", "PAD_TOKEN=[PAD]"),
    *("docker://alpine:3.18@sha256:0123", "'-----BEGIN PRIVATE KEY-----' in text", "max_token: 1000000000"),
    *("docker run -u 1000:1000 x", "bearer authentication-scheme", "--token TOKEN  of the server"),
    *("MAX_TOKENS=4096", "token = tokenizer.next()", "max_tokens: 100000", "git+ssh://git@github.com/a/b"),
    *(
        "the password is wrong",
        "http://localhost:8000/x",
        "password: string",
        "PASSWORD=$SECRET",
        "PWD=/home/a",
    ),
    *(
        "secret: <your key>",
        '{"token": " the", "logprob": -0.25}',
        "next_token: the 12 items",
        "password=***",
    ),
    *(
        f"\n  password: {word}\n"
        for word in ("str", "required", "SecretStr", "String!", "incorrect", "Optional[str]")
    ),
    *("{\n  password: newPass\n}", "\n  password: data.password\n", "\npassword: the one that you chose\n"),
    *("CACHE_KEY=linux-x64-node18-deadbeef", "SORT_KEY=created_at", "KEY=/home/ada/.ssh/id_ed25519"),
    *("echo $1$SOMETHING_LONG_VARIABLE_NAME", "tls.crt: LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSUR"),
    *("Private-Lines: 14 lines of base64", "pwd: workdir", "the hash begins with $2y$05$"),
)


@for_each(("text", "shown"), FOUND.items())
def test_a_secret_is_hidden_and_counted(text: str, shown: str) -> None:
    secrets = Secrets(True)
    assert secrets.text(f"a {text}") == f"a {shown}"
    assert secrets.hidden == 1
    assert Secrets(False).text(text) == text


@for_each("text", PLAIN)
def test_other_text_stays(text: str) -> None:
    secrets = Secrets(True)
    assert (secrets.text(text), secrets.hidden) == (text, 0)


@for_each(
    "part",
    [
        "token=",
        "password",
        "sk-",
        "://a:",
        "Authorization: ",
        "curl -u ",
        "\\",
        "key ",
        "eyJ",
        "$1$a",
        "\nA_KEY: a",
        "\npassword: a",
        "-",
    ],
)
def test_the_search_takes_time_in_proportion_to_the_text(part: str) -> None:
    """A quadratic search of this text takes minutes."""
    start = time.process_time()
    Secrets(True).text(f"{part * (100_000 // len(part))}token=")
    assert time.process_time() - start < 3


def test_no_secret_is_in_a_payload(tmp_path, capsys) -> None:
    """Two samples diverge inside of their keys, of which a segment holds the end."""
    answer = {"role": "assistant", "content": f"{'long ' * 57}https://ada:pa55w0rd77@example.com/{'x' * 400}"}
    rows = [
        {
            "group_id": "g",
            "id": f"PASSWORD=hunter{number}",
            "messages": [{"role": "user", "content": f"{KEY}{number}{'z' * 20} ok"}, answer],
        }
        for number in range(2)
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["xray", str(tmp_path / "d.jsonl"), "--json"]) == 0
    printed = capsys.readouterr().out
    for part in (KEY, "zzz", "pa55", "hunter"):
        assert part not in printed
    note = json.loads(printed)["notes"][0]
    assert note.startswith("Hidden in texts: ")
    assert note.endswith(" Others may be left; --show-secrets shows all.")
    assert main(["xray", str(tmp_path / "d.jsonl"), "--json", "--show-secrets"]) == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in (KEY, "hunter0"))
    assert "Hidden" not in printed
    assert main(["xray", str(tmp_path / "d.jsonl"), "--json", "--no-text"]) == 0
    printed = capsys.readouterr().out
    assert not any(part in printed for part in ("hunter", '"g"', "PASSWORD"))
