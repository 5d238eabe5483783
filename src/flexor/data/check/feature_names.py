"""The names of features: policies find actions, states and cameras by them."""

from __future__ import annotations

from flexor.core.batch import ACTION
from flexor.data.check.layout import Layout
from flexor.data.check.report import CheckReport
from flexor.data.check.tables import OWN_COLUMNS
from flexor.data.format.common_names import rename_flag, suggested_names


def check_feature_names(layout: Layout, report: CheckReport) -> None:
    """Suggest LeRobot's names for features that have other ones."""
    names = suggested_names(layout.features)
    if ACTION not in (*layout.features, *names.values()):
        listed = ", ".join(name for name in layout.features if name not in OWN_COLUMNS)
        message = f"no feature is called {ACTION}, which training needs: it has {listed or 'none'}"
        fix = "if one of them is the action, train with --rename_map='{NAME: action}'"
        report.error("feature-names", message, fix, file="meta/info.json")
    if not names:
        return
    needed = ACTION in names.values() or any(layout.features[name].is_camera for name in names)
    effect = "training stops" if needed else "training does not use it"
    pairs = ", ".join(f"{new} is {old}" for old, new in names.items())
    message = f"the names are not LeRobot's, so {effect}: perhaps {pairs}"
    flag = rename_flag(names)
    fix = f"train with {flag}; or write it with `flexor data repair {layout.root} NEW_FOLDER {flag}`"
    (report.error if needed else report.warning)("feature-names", message, fix, file="meta/info.json")
