import pytest

from flexor.core.errors import ConfigError
from flexor.core.option_parser import OptionParser


@pytest.fixture
def parser() -> OptionParser:
    parser = OptionParser(prog="flexor data")
    verbs = parser.add_subparsers(dest="verb", required=True)
    check = verbs.add_parser("check")
    check.add_argument("root")
    check.add_argument("--json", action="store_true")
    verbs.add_parser("show").add_argument("--images", type=int)
    return parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "x", "--jsno"], "Unknown option --jsno. Did you mean --json?"),
        (["check", "x", "--images=3"], "Unknown option --images. Available: --json."),
        (["check", "x", "y"], "Unknown argument y. `flexor data --help` lists all options."),
        (["chekc"], "argument verb: 'chekc' is not known. Did you mean check? `flexor data --help`"),
        (["check"], "the following arguments are required: root. `flexor data check --help` lists"),
        (
            ["show", "--images=many"],
            "argument --images: invalid int value: 'many'. `flexor data show --help`",
        ),
    ],
)
def test_an_error_names_the_option_that_was_meant(parser, words, message):
    with pytest.raises(ConfigError) as error:
        parser.parse_args(words)
    assert str(error.value).startswith(message)


def test_options_are_not_abbreviated(parser):
    assert parser.parse_args(["check", "x", "--json"]).json
    with pytest.raises(ConfigError, match="Did you mean --json"):
        parser.parse_args(["check", "x", "--jso"])
