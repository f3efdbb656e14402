# Values as data: charts of matplotlib, tables of pandas, and JSON. The driver compiles this file when a value needs it.
import json, math, re

# A point of a chart, or a cell of a table, has at least this many bytes.
CELL_BYTES = 3
UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")


class TooLong(Exception):
    pass


# Lists and dictionaries with values that JSON has, or None.
def json_of(value):
    try:
        return json.dumps(value, allow_nan=False, default=converted, ensure_ascii=False)
    except RecursionError:
        return None
    except (TypeError, ValueError):
        pass
    try:
        return json.dumps(finite(value), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None


# A value of another package as one that JSON has.
def converted(value):
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(type(value).__name__)


def finite(value):
    if isinstance(value, dict):
        return {key if isinstance(key, (str, int, float, type(None))) else converted(key): finite(one)
                for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    return finite(converted(value))


# The columns of a table.
def table_of(frame, limit):
    if frame.size > limit // CELL_BYTES:
        raise TooLong
    columns, size = {}, 0
    for at, name in enumerate(frame.columns):
        values = json.dumps([cell(one) for one in frame.iloc[:, at].tolist()], ensure_ascii=False)
        size += len(values)
        if size > limit:
            raise TooLong
        columns[json.dumps(str(name), ensure_ascii=False)] = values
    return "{%s}" % ", ".join("%s: %s" % column for column in columns.items())


def cell(value):
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    try:
        return finite(value)
    except (TypeError, ValueError, RecursionError):
        return str(value)


# The chart of a figure, or None without data.
def chart_of(figure, limit):
    if not any(ax.has_data() for ax in figure.axes):
        return None
    counts = [len(line.get_xdata()) for ax in figure.axes for line in ax.lines]
    counts += [len(one.get_offsets()) for ax in figure.axes for one in ax.collections]
    if sum(counts) > limit // (2 * CELL_BYTES):
        raise TooLong
    charts = [Chart(ax).made for ax in figure.axes]
    chart = charts[0]
    if len(charts) > 1:
        title = getattr(figure, "_suptitle", None)
        chart = {"type": "superchart", "title": title.get_text() if title else "", "elements": charts}
    return json.dumps(chart, allow_nan=False, ensure_ascii=False)


# A number without the noise of its arithmetic.
def number(value):
    value = float("%.9g" % value)
    return value if math.isfinite(value) else None


def point(value):
    if isinstance(value, str):
        return value
    if type(value).__name__ == "datetime64":
        return str(value.astype("datetime64[s]"))
    if hasattr(value, "isoformat"):
        return value.isoformat()
    try:
        value = float(value)
    except (TypeError, ValueError):
        return None if type(value).__name__ == "MaskedConstant" else str(value)
    return value if math.isfinite(value) else None


def points_of(*sides):
    sides = [side.astype(float).tolist() if getattr(side, "dtype", None) == float else side for side in sides]
    return [[one if type(one) is float and math.isfinite(one) else point(one) for one in spot] for spot in zip(*sides)]


class Direction:
    """One direction of a chart: its label, ticks and scale."""

    def __init__(self, axis, label, scale):
        self.label = label or None
        unit = UNIT.search(label)
        self.unit = (unit.group(1) or unit.group(2)) if unit else None
        self.positions = [float(tick) for tick in axis.get_ticklocs()]
        self.names = [text.get_text() for text in axis.get_ticklabels()]
        converter = axis.get_converter() if hasattr(axis, "get_converter") else axis.converter
        kinds = [kind.__name__ for kind in type(converter).__mro__]
        self.is_date = any("Date" in kind for kind in kinds) and "PeriodConverter" not in kinds
        self.scale = "datetime" if self.is_date else scale
        is_named = bool(self.positions) and all(
            position == at and name != str(at) for at, (position, name) in enumerate(zip(self.positions, self.names))
        )
        if self.scale == "linear" and (is_named or "StrCategoryConverter" in kinds):
            self.scale = "categorical"

    @property
    def ticks(self):
        return [date(one).isoformat() for one in self.positions] if self.is_date else self.positions

    # The name of a position: that of its tick, or of the nearest one between categories.
    def name(self, position, is_category):
        near = min(zip(self.positions, self.names), key=lambda tick: abs(tick[0] - position), default=None)
        if near and near[1] and abs(near[0] - position) <= (0.5 if is_category else 1e-9):
            return near[1]
        return self.at(position) if self.is_date else "%g" % position

    # The value at a position of the drawing.
    def at(self, position):
        if not math.isfinite(position):
            return None
        if self.is_date:
            return date(position).replace(tzinfo=None).isoformat()
        if self.scale == "categorical" and position in self.positions:
            return self.names[self.positions.index(position)]
        return point(position)


def date(days):
    from matplotlib.dates import num2date

    return num2date(days)


def drawn(line):
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(orig=False), line.get_ydata(orig=False))]


# Whether a line is of a grid or marks a value: two points, one beside or above the other.
def is_mark(line):
    if len(line.get_xdata()) != 2:
        return False
    first, last = drawn(line)
    return first[0] == last[0] or first[1] == last[1]


# The lines that may be boxes of a box plot: closed ones.
def outlines(lines):
    found = [(line, drawn(line)) for line in lines if 4 < len(line.get_xdata()) < 100]
    return [(line, points) for line, points in found if points[0] == points[-1]]


class Chart:
    """The chart of one pair of axes."""

    def __init__(self, ax):
        self.ax = ax
        self.x = Direction(ax.xaxis, ax.get_xlabel(), ax.get_xscale())
        self.y = Direction(ax.yaxis, ax.get_ylabel(), ax.get_yscale())
        kind, elements = self.found()
        self.made = {"type": kind, "title": ax.get_title() or None, "elements": elements}
        if kind in ("unknown", "pie"):
            return
        for name, side in (("x", self.x), ("y", self.y)):
            self.made.update({name + "_label": side.label, name + "_unit": side.unit})
            if kind in ("line", "scatter"):
                self.made.update({name + "_ticks": side.ticks, name + "_tick_labels": side.names,
                                  name + "_scale": side.scale})

    # The type of the chart, by what is drawn, and its elements.
    def found(self):
        from matplotlib.collections import PathCollection
        from matplotlib.container import BarContainer, ErrorbarContainer
        from matplotlib.patches import PathPatch, Rectangle, Wedge

        ax = self.ax
        errors = [one.lines for one in ax.containers if isinstance(one, ErrorbarContainer)]
        errors = {id(part) for _, caps, bars in errors for part in (*caps, *bars)}
        lines = [one for one in ax.lines if id(one) not in errors]
        collections = [one for one in ax.collections if id(one) not in errors]
        patches = list(ax.patches)
        bars = [one for one in ax.containers if isinstance(one, BarContainer)]
        only = lambda artists, kind: all(isinstance(one, kind) for one in artists)
        unknown = "unknown", []
        if ax.name == "3d" or list(ax.images) or list(ax.tables) or list(ax.artists):
            return unknown
        if not collections and only(patches, PathPatch):
            elements = self.boxes([(one, one.get_path().vertices.tolist()) for one in patches] or outlines(lines))
            if elements:
                return "box_and_whisker", elements
        if not patches and not collections:
            return "line", self.lines(lines)
        if not all(map(is_mark, lines)):
            return unknown
        if not patches and only(collections, PathCollection):
            return "scatter", self.dots()
        if not collections and only(patches, Wedge):
            return "pie", self.wedges()
        if bars and not collections and only(patches, Rectangle):
            return "bar", self.bars(bars)
        return unknown

    def lines(self, lines):
        elements = []
        for line in lines:
            if is_mark(line) and line.get_transform() != self.ax.transData:
                continue
            label = re.sub(r"^_child(\d+)$", r"Line \1", str(line.get_label()))
            elements.append({"label": label, "points": points_of(line.get_xdata(), line.get_ydata())})
        return elements

    def dots(self):
        elements = []
        for one in self.ax.collections:
            points = [[self.x.at(x), self.y.at(y)] for x, y in one.get_offsets().tolist() if None not in (x, y)]
            elements.append({"label": str(one.get_label()), "points": points})
        return elements

    def wedges(self):
        return [{"label": str(one.get_label()), "angle": round(abs(float(one.theta2) - float(one.theta1)), 3),
                 "radius": number(one.r)} for one in self.ax.patches]

    def bars(self, groups):
        elements, is_horizontal = [], False
        for group in groups:
            heights = {one.get_height() for one in group}
            direction = getattr(group, "orientation", None)
            horizontal = direction == "horizontal" if direction else len(heights) == 1
            is_horizontal |= horizontal
            side = self.y if horizontal else self.x
            label = re.sub(r"^_container(\d+)$", r"Group \1", str(group.get_label()))
            for one in group:
                left, length, value = one.get_x(), one.get_width(), one.get_height()
                if horizontal:
                    left, length, value = one.get_y(), value, length
                name = side.name(float(left + length / 2), side.scale == "categorical")
                elements.append({"label": name, "group": label, "value": point(value)})
        if is_horizontal:
            self.x, self.y = self.y, self.x
        return elements

    # The boxes of a box plot, upright or lying.
    def boxes(self, found):
        elements = self.assembled(found, lambda x, y: (x, y), self.x)
        if not elements:
            elements = self.assembled(found, lambda x, y: (y, x), self.y)
            if elements:
                self.x, self.y = self.y, self.x
        return elements

    # The boxes with their lines, or None if one of them is incomplete. `turned` gives place and value of a point.
    def assembled(self, boxes, turned, side):
        own = {id(one) for one, _ in boxes}
        lines = [(one, [turned(*spot) for spot in drawn(one)]) for one in self.ax.lines if id(one) not in own]
        elements = []
        for _, outline in boxes:
            places, values = zip(*[turned(*spot) for spot in outline])
            first, last = min(places), max(places)
            low, high = number(min(values)), number(max(values))
            median, width, ends, alone = None, -1, {}, []
            for line, spots in lines:
                spots = [(place, number(value)) for place, value in spots if first <= place <= last]
                if line.get_linestyle() in ("None", "", " "):
                    alone += [value for _, value in spots]
                elif len(spots) == 2:
                    (from_place, start), (to_place, end) = spots
                    if start == end and low <= start <= high and abs(to_place - from_place) >= max(width, 1e-9):
                        median, width = start, abs(to_place - from_place)
                    elif from_place == to_place and max(start, end) == low and "min" not in ends:
                        ends["min"] = min(start, end)
                    elif from_place == to_place and min(start, end) == high:
                        ends["max"] = max(start, end)
            if median is None or len(ends) < 2:
                return None
            outliers = [value for value in alone if not ends["min"] <= value <= ends["max"]]
            elements.append({"label": side.name((first + last) / 2, True), "min": ends["min"], "first_quartile": low,
                             "median": median, "third_quartile": high, "max": ends["max"], "outliers": outliers})
        return elements
