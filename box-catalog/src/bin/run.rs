//! Changes a store without an end, and prints each change before and after it.
//!
//! `box-catalog-run DIR SEED`. The tests of the crate kill it and compare the store with the lines.

use std::io::Write as _;
use std::path::Path;

use box_catalog::{Catalog, Error, Limits, NewItem, Viewer};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent, ItemState, VolumeContent};
use box_protocol::{ItemRef, Labels, Name};

/// Names and tags that the program uses.
const NAMES: u64 = 12;
const TAGS: u64 = 4;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(directory), Some(seed)) = (arguments.next(), arguments.next()) else {
        return Err("usage: box-catalog-run DIR SEED".into());
    };
    let catalog = Catalog::open(Path::new(&directory), Limits::default())?;
    let mut random = Random(seed.parse::<u64>()? | 1);
    print("open")?;
    loop {
        let name = Name::new(format!("n{}", random.below(NAMES)))?;
        let found = find(&catalog, &name)?;
        match (random.below(4), found) {
            (_, None) => {
                print(&format!("try put {name}"))?;
                put(&catalog, name.clone())?;
                print(&format!("ok put {name}"))?;
            }
            (0, Some(item)) => {
                print(&format!("try delete {name}"))?;
                catalog.remove(CatalogKind::Volume, &item.id)?;
                print(&format!("ok delete {name}"))?;
            }
            (1, Some(item)) => {
                let tag = Name::new(format!("t{}", random.below(TAGS)))?;
                print(&format!("try tag {name} {tag}"))?;
                catalog.update(CatalogKind::Volume, &item.id, |item| {
                    item.tags.push(tag.clone());
                    Ok(())
                })?;
                print(&format!("ok tag {name} {tag}"))?;
            }
            (_, Some(item)) => {
                let value = random.below(1000).to_string();
                print(&format!("try label {name} {value}"))?;
                catalog.update(CatalogKind::Volume, &item.id, |item| {
                    item.labels.insert("value".to_owned(), value.clone());
                    Ok(())
                })?;
                print(&format!("ok label {name} {value}"))?;
            }
        }
    }
}

fn find(catalog: &Catalog, name: &Name) -> Outcome<Option<CatalogItem>> {
    let viewer = Viewer {
        owner: "me",
        sees_all: false,
    };
    let item = ItemRef::new(name)?;
    match catalog.find(viewer, CatalogKind::Volume, &item) {
        Ok(item) => Ok(Some(item)),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Adds an item in two steps, as a server does that makes its data in between.
fn put(catalog: &Catalog, name: Name) -> Outcome<()> {
    let new = NewItem {
        owner: "me".to_owned(),
        name,
        tags: Vec::new(),
        labels: Labels::new(),
        state: ItemState::Building,
        size_bytes: None,
        content: ItemContent::Volume(VolumeContent {
            size_mb: 64,
            shared: false,
            enforced: false,
        }),
    };
    let item = catalog.insert(new)?;
    catalog.update(CatalogKind::Volume, &item.id, |item| {
        item.state = ItemState::Ready;
        Ok(())
    })?;
    Ok(())
}

fn print(line: &str) -> Outcome<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// A generator of numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}
