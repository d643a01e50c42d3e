"""The segmentation table as people read it, and the lecture's three panels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from doxa.app.bench import image_figures, scenes
from doxa.app.bench.cells import Store
from doxa.app.bench.image_tables import ImageTable
from doxa.app.bench.tables import Table, mean_of
from doxa.app.bench.uci import data_folder
from doxa.errors import DataError

_WHERE = ("right", "wrong")


@dataclass(frozen=True)
class SceneTable(ImageTable):
    """Pixels instead of rows."""

    def tables(self, store: Store) -> list[Table]:
        cells = {method: own for (_, method), own in self.cells(store).items()}
        columns = ["mean IoU", "pixel accuracy %", "NLL", "Brier", "ECE", "entropy right / wrong",
                   "MI right / wrong", "fit s", "predict s"]  # fmt: skip
        table = Table(f"{self.title}: labelled test pixels", ["method", *columns])
        for method, own in cells.items():
            results = [c["result"] for c in own]
            of = lambda key, results=results: [r["scores"][key] for r in results]  # noqa: E731
            accuracy = [100 * value for value in of("accuracy")]
            doubt = [
                " / ".join(mean_of([r["doubt"][w][kind] for r in results], 3) for w in _WHERE)
                for kind in ("entropy", "mutual_information")
            ]
            seconds = [mean_of([r[f"{p}_seconds"] for r in results], 1) for p in ("fit", "predict")]
            table.rows.append(
                [
                    method, mean_of(of("mean_iou"), 3), mean_of(accuracy, 2),
                    mean_of([-v for v in of("log_likelihood")], 3), mean_of(of("brier"), 3),
                    mean_of(of("ece"), 3), *doubt, *seconds,
                ]
            )  # fmt: skip
        table.notes += [f"{m}: {own[0]['result']['protocol']}" for m, own in cells.items()]
        table.notes.append("367 frames of 72 × 96 pixels to train on, 233 to test on, 11 classes")
        return [table] if table.rows else []

    def figures(self, store: Store, folder: Path) -> list[Path]:
        """The panels of MC dropout (the lecture's), where the frames are at hand."""
        cells = {method: own[0]["result"] for (_, method), own in self.cells(store).items()}
        chosen = cells.get("mc-dropout") or next(iter(cells.values()), None)
        if chosen is None or chosen["settings"].get("test_rows") is not None:
            return []
        try:
            data = data_folder(None)
        except DataError:
            return []
        panels = [scenes.unpack(panel) for panel in chosen["panels"]]
        images, _ = scenes.shown_frames(data, [panel.frame for panel in panels])
        return [image_figures.scene_figure(images, panels, folder / "camvid.png")]


CAMVID = SceneTable("camvid", "CamVid", ("camvid",), scenes.METHODS, scenes.camvid_cell)
