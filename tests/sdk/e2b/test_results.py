"""Results of matplotlib, pandas and PIL, and large ones."""

import base64
import datetime
import hashlib
import json

import e2b_code_interpreter as interpreter
import pytest
import science
from e2b_code_interpreter.charts import (
    BarChart,
    BoxAndWhiskerChart,
    Chart,
    ChartType,
    LineChart,
    PieChart,
    ScaleType,
    ScatterChart,
    SuperChart,
)

# The first import of a package takes long on a busy machine.
SECONDS = 250


@pytest.fixture(scope="module")
def code(server, tmp_path_factory):
    name = science.template(tmp_path_factory.mktemp("science"), "matplotlib", "pandas", "pillow")
    sandbox = interpreter.Sandbox.create(name, timeout=1800)
    begun = sandbox.run_code("import matplotlib.pyplot as plt, numpy as np, pandas as pd", timeout=SECONDS)
    assert begun.error is None, begun
    yield sandbox
    sandbox.kill()


def results(code, text: str):
    ran = code.run_code(text, timeout=SECONDS)
    assert ran.error is None, ran.error
    return ran.results


def chart(code, text: str):
    """Returns the chart of the only figure."""
    (result,) = results(code, text + "\nplt.show()")
    assert base64.b64decode(result.png).startswith(b"\x89PNG"), result.formats()
    assert result.text.startswith("<Figure size") and not result.extra
    return result.chart


def test_a_line_chart(code):
    made = chart(
        code,
        "plt.plot([1, 2, 3], [4, float('nan'), 6], label='first')\nplt.plot([1, 2], [0, 8])\nplt.axhline(5)\n"
        "plt.xlabel('Time (s)')\nplt.ylabel('Level [dB]')\nplt.title('Levels')\nplt.yscale('symlog')",
    )
    assert isinstance(made, LineChart) and made.title == "Levels"
    assert (made.x_label, made.x_unit, made.y_label, made.y_unit) == ("Time (s)", "s", "Level [dB]", "dB")
    assert (made.x_scale, made.y_scale) == (ScaleType.LINEAR, ScaleType.SYMLOG)
    assert [line.label for line in made.elements] == ["first", "Line 1"]
    assert made.elements[0].points == [(1, 4), (2, None), (3, 6)]
    assert made.elements[1].points == [(1, 0), (2, 8)]
    assert len(made.x_ticks) == len(made.x_tick_labels) > 1 and all(isinstance(tick, float) for tick in made.x_ticks)


def test_scales_of_dates_and_names(code):
    made = chart(
        code,
        "import datetime\ndays = [datetime.date(2024, 2, 27) + datetime.timedelta(n) for n in range(4)]\n"
        "plt.plot(days, ['a', 'b', 'a', 'c'])",
    )
    assert (made.x_scale, made.y_scale) == (ScaleType.DATETIME, ScaleType.CATEGORICAL)
    assert made.elements[0].points[2] == ("2024-02-29", "a")
    assert datetime.datetime.fromisoformat(made.x_ticks[0]).year == 2024
    assert made.y_tick_labels == ["a", "b", "c"]
    series = "pd.Series([1., 2.], index=pd.to_datetime(['2024-01-01 00:00', '2024-01-05 06:00']))"
    made = chart(code, f"data = {series}\nplt.scatter(data.index, data)")
    assert isinstance(made, ScatterChart) and made.x_scale == ScaleType.DATETIME
    assert made.elements[0].points == [("2024-01-01T00:00:00", 1), ("2024-01-05T06:00:00", 2)]


def test_a_scatter_chart(code):
    text = "plt.scatter([1, 2], [3, 4], label='one')\nplt.scatter([5], [6], label='two')\nplt.grid(True)"
    made = chart(code, text)
    assert isinstance(made, ScatterChart) and made.title is None
    assert [(group.label, group.points) for group in made.elements] == [("one", [(1, 3), (2, 4)]), ("two", [(5, 6)])]


def test_bar_charts(code):
    made = chart(
        code, "plt.bar(['a', 'b'], [2, 2], yerr=[1, 1], capsize=3, label='same')\nplt.xlabel('x')\nplt.ylabel('y')"
    )
    bars = [(bar.label, bar.group, bar.value) for bar in made.elements]
    assert isinstance(made, BarChart) and bars == [("a", "same", 2), ("b", "same", 2)]
    assert (made.x_label, made.y_label) == ("x", "y")
    made = chart(code, "plt.barh(['a', 'b'], [1, 2])\nplt.barh(['a', 'b'], [3, 4], left=[1, 2])\nplt.xlabel('sum')")
    bars = [(bar.label, bar.group, bar.value) for bar in made.elements]
    assert bars == [("a", "Group 0", 1), ("b", "Group 0", 2), ("a", "Group 1", 3), ("b", "Group 1", 4)]
    assert (made.x_label, made.y_label) == (None, "sum"), "names are the first direction"
    frame = "pd.DataFrame({'p': [1, 2], 'q': [3, 4]}, index=['x', 'y'])"
    made = chart(code, f"{frame}.plot.bar(ax=plt.gca())")
    bars = [(bar.label, bar.group, bar.value) for bar in made.elements]
    assert bars == [("x", "p", 1), ("y", "p", 2), ("x", "q", 3), ("y", "q", 4)]


def test_a_pie_chart(code):
    made = chart(code, "plt.pie([90, 30], labels=['many', 'few'], autopct='%1.1f%%', radius=2)\nplt.title('Parts')")
    assert isinstance(made, PieChart) and made.title == "Parts"
    parts = [(part.label, part.angle, part.radius) for part in made.elements]
    assert parts == [("many", 270, 2), ("few", 90, 2)]


SCORES = "{'A': [85, 90, 78, 92, 88], 'B': [95, 89, 76, 70, 91, 84, 87]}"


@pytest.mark.parametrize("options", ["patch_artist=True", "showmeans=True", "orientation='horizontal'"])
def test_a_box_plot(code, options):
    text = f"scores = {SCORES}\nplt.boxplot(scores.values(), tick_labels=list(scores), {options})\nplt.xlabel('x')"
    made = chart(code, text)
    assert isinstance(made, BoxAndWhiskerChart)
    first, second = made.elements
    quartiles = (first.min, first.first_quartile, first.median, first.third_quartile, first.max)
    assert (first.label, quartiles, first.outliers) == ("A", (78, 85, 88, 90, 92), [])
    quartiles = (second.min, second.first_quartile, second.median, second.third_quartile, second.max)
    assert (second.label, quartiles, second.outliers) == ("B", (70, 80, 87, 90, 95), [])
    assert (made.x_label, made.y_label) == ((None, "x") if "horizontal" in options else ("x", None))


def test_the_outliers_of_a_box_plot(code):
    made = chart(code, "plt.boxplot([[1, 2, 3, 4, 5, 30, 40, -20]])")
    assert sorted(made.elements[0].outliers) == [-20, 30, 40]
    assert (made.elements[0].min, made.elements[0].max) == (1, 11.25)


def test_several_charts_and_others(code):
    made = chart(
        code,
        "figure, (left, right) = plt.subplots(1, 2)\nfigure.suptitle('Both')\nleft.plot([1, 2, 4])\n"
        "left.set_title('Left')\nright.scatter([1], [2])",
    )
    assert isinstance(made, SuperChart) and made.title == "Both"
    assert [type(one) for one in made.elements] == [LineChart, ScatterChart]
    assert made.elements[0].title == "Left" and len(made.elements[0].elements[0].points) == 3
    made = chart(code, "plt.gca().add_artist(plt.Circle((0, 0), 1))\nplt.title('Circle')")
    assert type(made) is Chart and made.type == ChartType.UNKNOWN
    assert (made.title, made.elements) == ("Circle", [])
    assert chart(code, "plt.imshow(np.eye(3))").type == ChartType.UNKNOWN
    assert chart(code, "plt.figure().add_subplot()") is None, "a figure without data"
    ran = code.run_code("plt.scatter([1], [2])\nplt.show()", timeout=SECONDS)
    assert json.loads(ran.to_json())["results"][0]["chart"]["type"] == "scatter"


def test_tables(code):
    (table,) = results(
        code,
        "pd.DataFrame({'n': [1, 2], 'f': [0.5, float('inf')], 't': pd.to_datetime(['2024-05-06 07:08', None]),\n"
        "  's': ['x', None], 7: [pd.Timedelta('1h'), pd.NA]})",
    )
    assert table.html.startswith("<div>") and "2024-05-06" in table.text and table.is_main_result
    expected = {"n": [1, 2], "f": [0.5, None], "t": ["2024-05-06T07:08:00", None], "s": ["x", None]}
    assert {name: table.data[name] for name in expected} == expected
    assert table.data["7"][1] is None and not table.extra
    (series,) = results(code, "pd.Series([1])")
    assert series.data is None and series.text.startswith("0    1")


def test_values_as_json(code):
    (value,) = results(code, "{'a': np.arange(3), 'b': [float('nan'), None, True], 5: pd.Timestamp('2024-01-02')}")
    assert value.json == {"a": [0, 1, 2], "b": [None, None, True], "5": "2024-01-02T00:00:00"}
    (value,) = results(code, "[object()]")
    assert value.json is None and value.formats() == ["text"]
    (value,) = results(code, "loop = []\nloop.append(loop)\nloop")
    assert value.json is None and value.text == "[[...]]"


def test_every_format_of_a_value(code):
    text = (
        "class All:\n"
        "  def _repr_html_(self): return '<p>'\n  def _repr_markdown_(self): return '*m*'\n"
        "  def _repr_latex_(self): return '$l$'\n  def _repr_svg_(self): return '<svg/>'\n"
        "  def _repr_javascript_(self): return 'js()'\n  def _repr_pdf_(self): return b'%PDF'\n"
        "  def _repr_jpeg_(self): return b'\\xff\\xd8'\n"
        "  def _repr_mimebundle_(self, include=None, exclude=None): return {'x/own': 'mine'}\n"
        "All()"
    )
    (result,) = results(code, text)
    assert (result.html, result.markdown, result.latex) == ("<p>", "*m*", "$l$")
    assert (result.svg, result.javascript) == ("<svg/>", "js()")
    assert (base64.b64decode(result.pdf), base64.b64decode(result.jpeg)) == (b"%PDF", b"\xff\xd8")
    assert result.extra == {"x/own": "mine"}


def test_pictures(code):
    text = "from PIL import Image\nimage = Image.new('RGB', (2, 3), 'red')\nimage.show()\nimage"
    shown, main = results(code, text)
    assert (shown.is_main_result, main.is_main_result) == (False, True)
    for picture in (shown, main):
        assert base64.b64decode(picture.png).startswith(b"\x89PNG")


def test_large_results_arrive_whole(code):
    (text,) = results(code, "'y' * 5_000_000")
    assert text.text == "y" * 5_000_000
    (picture,) = results(
        code,
        "import hashlib, random\ndata = random.randbytes(5_000_000)\nprint(end='')\n"
        "class Picture:\n  def _repr_png_(self): return data\n  def __repr__(self): return hashlib.sha256(data).hexdigest()\n"
        "Picture()",
    )
    sent = base64.b64decode(picture.png)
    assert len(sent) == 5_000_000 and hashlib.sha256(sent).hexdigest() == picture.text
    (table,) = results(code, "pd.DataFrame({'n': range(400_000)})")
    assert table.data["n"] == list(range(400_000))


def test_sizes_beyond_a_limit_are_refused_with_the_limit(code):
    limit = "the values of a run have at most 10 MiB"
    (text,) = results(code, "'y' * 11_000_000")
    assert text.text.startswith("'yyy") and text.text.endswith("[truncated]") and len(text.text) < 2000
    (picture,) = results(
        code,
        "class Picture:\n  def _repr_png_(self): return bytes(9_000_000)\n  def _repr_html_(self): return '<p>'\n"
        "  def __repr__(self): return 'a picture'\nPicture()",
    )
    assert picture.png is None and picture.html == "<p>"
    assert picture.text == f"a picture\n[image/png omitted: {limit}]"
    (table,) = results(code, "pd.DataFrame(np.zeros((5_000_000, 1)))")
    assert table.data is None and table.html and limit in table.text
    (figure,) = results(code, "plt.plot(np.arange(3_000_000))\nplt.show()")
    assert figure.png and figure.chart is None and limit in figure.text
    assert results(code, "1 + 1")[0].text == "2"


def test_figures_that_ipython_displays(code):
    missing = code.run_code("import IPython", timeout=SECONDS).error
    assert not missing, "the machine has no IPython; install ipython3, as cargo xtask test does"
    shown, main = results(
        code,
        "from IPython.display import display\nfigure = plt.figure()\nplt.plot([1, 3])\ndisplay(figure)\n{'a': [1]}",
    )
    assert isinstance(shown.chart, LineChart) and shown.png and not shown.is_main_result
    assert main.json == {"a": [1]}
    (raw,) = results(code, "display({'text/latex': r'\\text{x}'}, raw=True)")
    assert raw.formats() == ["latex"]
