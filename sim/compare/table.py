"""The table of a comparison in Markdown."""

from collections.abc import Sequence

from sim.compare.results import Score, best_by_label, target_accuracy


def format_comparison(found: Sequence[Score], target_share: float) -> str:
    """Return a table of one stage, each entry at its best step size, by uplink.

    Accuracy is the mean of the last evaluations, with its spread over the seeds; the target a share
    of float32's accuracy in the same stage, and an entry reaches it when every seed does.

    Parameters
    ----------
    found : sequence of Score
        Of one stage.
    target_share : float
        Part of float32's accuracy.
    """
    target = target_accuracy(found, target_share)
    title = "MB to the target" if target is None else f"MB to {target:.1%}"
    header = [
        "compressor", "lr", "accuracy", "bits per parameter", "R, MB", title,
        "points per MB", "encode, ms", "decode, ms",
    ]  # fmt: skip
    rows = [header, ["---"] * len(header)]
    for score in sorted(best_by_label(found).values(), key=lambda score: -score.mean("R")):
        reached = None if target is None else score.megabytes_to(target)
        spread = "" if score.spread is None else f" ± {100 * score.spread:.2f}"
        rows.append(
            [
                score.label.replace("|", "\\|"),
                f"{score.lr:g}",
                f"{100 * score.mean('accuracy'):.2f}{spread} %",
                f"{score.mean('bits_per_parameter'):.3f}",
                f"{score.mean('R') / 8e6:.3f}",
                "not reached" if reached is None else f"{reached:.3f}",
                f"{score.accuracy_per_megabyte:.3g}",
                f"{1e3 * score.mean('encode_seconds'):.1f}",
                f"{1e3 * score.mean('decode_seconds'):.1f}",
            ]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
