//! The progress of a pull: a bar for each layer on a terminal, lines elsewhere.

use std::collections::HashMap;

use box_protocol::actions::{ImageLayer, LayerPhase, PullProgress};
use indicatif::{MultiProgress, ProgressBar};

use crate::progress::{has_bars, styled};
use crate::stats::bytes;
use crate::{output, terminal};

/// Layout of the bar of a layer.
const LAYER: &str =
    "{prefix}  {msg:11} {wide_bar} {bytes:>10} of {total_bytes:<10} {bytes_per_sec}";

/// Columns that [`LAYER`] needs, with a short bar.
const LAYER_COLUMNS: usize = 72;

/// The same on a narrow terminal. A longer line would wrap.
const NARROW_LAYER: &str = "{prefix}  {msg:11} {wide_bar} {percent:>3}%";

/// Layout of the last line.
const TOTAL: &str = "{prefix}  {msg}  {bytes} of {total_bytes}  {bytes_per_sec}  {elapsed}";

/// Columns that [`TOTAL`] needs, beside the name of the image.
const TOTAL_COLUMNS: usize = 70;

/// The same on a narrow terminal.
const NARROW_TOTAL: &str = "{wide_msg} {bytes} of {total_bytes}";

/// Digits of a layer's digest that are shown.
const DIGITS: usize = 12;

/// The progress of one pull.
pub(super) struct PullDisplay {
    name: String,
    layers: HashMap<String, Layer>,
    complete: usize,
    /// Whether a layer was reported.
    has_progress: bool,
    shown: Shown,
}

enum Shown {
    Nothing,
    Lines,
    Bars(Bars),
}

struct Bars {
    all: MultiProgress,
    total: ProgressBar,
    /// Layout of the bar of a layer.
    layer: &'static str,
    /// Number of layers that may have a bar at the same time.
    room: usize,
}

#[derive(Default)]
struct Layer {
    size: u64,
    downloaded: u64,
    unpacked: u64,
    is_complete: bool,
    bar: Option<ProgressBar>,
}

impl PullDisplay {
    pub(super) fn new(name: &str, quiet: bool) -> Self {
        let shown = if quiet {
            Shown::Nothing
        } else if has_bars() {
            Shown::Bars(Bars::new(name))
        } else {
            Shown::Lines
        };
        Self {
            name: output::visible(name).into_owned(),
            layers: HashMap::new(),
            complete: 0,
            has_progress: false,
            shown,
        }
    }

    /// Shows a report.
    pub(super) fn show(&mut self, progress: PullProgress) {
        match progress {
            PullProgress::Resolved { layers, .. } => self.resolved(layers),
            PullProgress::Layer {
                digest,
                phase,
                done,
                total,
            } => self.layer(&digest, phase, done, total),
            PullProgress::Retry { reason, wait_ms } => {
                let seconds = wait_ms.div_ceil(1000);
                let reason = output::visible(&reason);
                self.line(&format!("boxd: {reason}; retrying in {seconds} s"));
            }
            PullProgress::Saving {} => match &self.shown {
                Shown::Bars(bars) => bars.total.set_message("writing to disk"),
                Shown::Lines => self.line("boxd: writing the image to disk"),
                Shown::Nothing => {}
            },
        }
    }

    /// Removes the bars.
    pub(super) fn clear(&self) {
        if let Shown::Bars(bars) = &self.shown {
            for layer in self.layers.values() {
                layer.bar.iter().for_each(ProgressBar::finish_and_clear);
            }
            bars.total.finish_and_clear();
        }
    }

    /// Removes the bars, and reports an image that the server has.
    pub(super) fn finish(self, is_pulled: bool) {
        self.clear();
        let quiet = matches!(self.shown, Shown::Nothing);
        if is_pulled && !quiet && !self.has_progress {
            output::eprintln(&format!("boxd: {} is up to date", self.name));
        }
    }

    fn line(&self, line: &str) {
        match &self.shown {
            Shown::Nothing => {}
            Shown::Lines => output::eprintln(line),
            Shown::Bars(bars) => bars.all.suspend(|| output::eprintln(line)),
        }
    }

    fn resolved(&mut self, layers: Vec<ImageLayer>) {
        let count = layers.len();
        for layer in layers {
            let size = layer.size;
            self.layers.entry(layer.digest).or_default().size = size;
        }
        let size = self.layers.values().map(|layer| layer.size).sum();
        match &self.shown {
            Shown::Nothing => {}
            Shown::Lines => {
                let (name, size) = (&self.name, bytes(size));
                let layers = if count == 1 { "layer" } else { "layers" };
                self.line(&format!("boxd: {name} has {count} {layers}, {size}"));
            }
            Shown::Bars(bars) => bars.total.set_length(size),
        }
        self.show_total();
    }

    fn layer(&mut self, digest: &str, phase: LayerPhase, done: u64, total: u64) {
        let count = self.layers.len();
        let Some(layer) = self.layers.get_mut(digest) else {
            return;
        };
        self.has_progress = true;
        layer.size = total;
        match phase {
            LayerPhase::Download => layer.downloaded = done,
            LayerPhase::Unpack => layer.unpacked = done,
            LayerPhase::Done if layer.is_complete => {}
            LayerPhase::Done => {
                (layer.is_complete, layer.downloaded) = (true, total);
                self.complete += 1;
            }
        }
        if let Shown::Bars(bars) = &mut self.shown {
            bars.show_layer(digest, layer);
        }
        if phase == LayerPhase::Done {
            let (complete, size) = (self.complete, bytes(total));
            if let Shown::Lines = self.shown {
                self.line(&format!(
                    "boxd: {complete} of {count} layers complete, {size}"
                ));
            }
        }
        self.show_total();
    }

    fn show_total(&self) {
        if let Shown::Bars(bars) = &self.shown {
            let downloaded = self.layers.values().map(|layer| layer.downloaded).sum();
            let (complete, count) = (self.complete, self.layers.len());
            bars.total
                .set_message(format!("{complete} of {count} layers"));
            if bars.total.position() == 0 {
                // What an earlier attempt has downloaded does not count for the speed.
                bars.total.reset_eta();
            }
            bars.total.set_position(downloaded);
        }
    }
}

/// The layouts of a layer and of the last line, for a terminal and a name of this width.
fn layouts(columns: usize, name: usize) -> (&'static str, &'static str) {
    let layer = if columns < LAYER_COLUMNS {
        NARROW_LAYER
    } else {
        LAYER
    };
    let total = if columns < name + TOTAL_COLUMNS {
        NARROW_TOTAL
    } else {
        TOTAL
    };
    (layer, total)
}

impl Bars {
    fn new(name: &str) -> Self {
        let all = MultiProgress::new();
        let name = output::visible(name);
        let (columns, rows) = terminal::size().unwrap_or((80, 24));
        let (columns, rows) = (usize::from(columns), usize::from(rows));
        let (layer, total) = layouts(columns, name.chars().count());
        let total = all.add(styled(ProgressBar::new(0), total));
        total.set_prefix(name.into_owned());
        total.set_message("asking the registry");
        Self {
            all,
            total,
            layer,
            room: rows.saturating_sub(2).max(1),
        }
    }

    fn show_layer(&mut self, digest: &str, layer: &mut Layer) {
        if layer.is_complete {
            if let Some(bar) = layer.bar.take() {
                bar.finish_and_clear();
                self.all.remove(&bar);
                self.room += 1;
            }
            return;
        }
        if layer.bar.is_none() {
            if self.room == 0 {
                return;
            }
            self.room -= 1;
            let bar = styled(ProgressBar::new(layer.size), self.layer);
            let bar = self.all.insert_before(&self.total, bar);
            let hex = digest.rsplit(':').next().unwrap_or(digest);
            let short: String = hex.chars().take(DIGITS).collect();
            bar.set_prefix(output::visible(&short).into_owned());
            bar.set_message("downloading");
            bar.set_position(layer.downloaded);
            bar.reset_eta();
            layer.bar = Some(bar);
        }
        let Some(bar) = &layer.bar else { return };
        if layer.downloaded < layer.size {
            bar.set_position(layer.downloaded);
        } else if layer.unpacked == 0 {
            bar.set_message("downloaded");
            bar.set_position(layer.size);
        } else {
            if bar.message() != "unpacking" {
                bar.set_message("unpacking");
                bar.reset_eta();
            }
            bar.set_position(layer.unpacked);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_a_narrow_terminal_are_shorter() {
        let debian = "debian:12".len();
        assert_eq!(layouts(120, debian), (LAYER, TOTAL));
        assert_eq!(layouts(80, debian), (LAYER, TOTAL));
        assert_eq!(layouts(80, 40), (LAYER, NARROW_TOTAL));
        assert_eq!(layouts(64, debian), (NARROW_LAYER, NARROW_TOTAL));
    }
}
