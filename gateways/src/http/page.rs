//! Parts of lists: numbered pages, and pages after a cursor.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use box_protocol::Invalid;

/// A numbered page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The items of the page.
    pub items: Vec<T>,
    /// The number of the page, from 1.
    pub number: usize,
    /// The maximum number of items of a page.
    pub size: usize,
    /// The number of items on all pages.
    pub total: usize,
}

impl<T> Page<T> {
    /// Cuts a page out of a list.
    pub fn of(items: Vec<T>, number: usize, size: usize) -> Self {
        let total = items.len();
        let start = number.saturating_sub(1).saturating_mul(size);
        let items = items.into_iter().skip(start).take(size).collect();
        Self {
            items,
            number,
            size,
            total,
        }
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.total.div_ceil(self.size.max(1))
    }

    /// Returns whether another page follows.
    pub fn has_next(&self) -> bool {
        self.number < self.pages()
    }
}

/// The order of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListOrder {
    /// The smallest key comes first.
    Ascending,
    /// The greatest key comes first.
    Descending,
}

/// Cuts a part of at most `limit` items out of a list, and returns the cursor of the next part.
///
/// The list must be sorted by `key`, which no two items share. The cursor is the key of the last item of the part, and
/// the next part begins with the first item after that key. A new or deleted item therefore does not shift it.
pub fn after_cursor<T, K: AsRef<str>>(
    items: Vec<T>,
    cursor: Option<&str>,
    limit: usize,
    order: ListOrder,
    key: impl Fn(&T) -> K,
) -> Result<(Vec<T>, Option<String>), Invalid> {
    let after = cursor.filter(|cursor| !cursor.is_empty()).map(decode);
    let after = after.transpose()?;
    let start = after.map_or(0, |after| {
        let is_seen = |item: &T| match order {
            ListOrder::Ascending => key(item).as_ref() <= after.as_str(),
            ListOrder::Descending => key(item).as_ref() >= after.as_str(),
        };
        items.partition_point(is_seen)
    });
    let more = items.len() > start.saturating_add(limit);
    let part: Vec<T> = items.into_iter().skip(start).take(limit).collect();
    let next = part.last().filter(|_| more);
    let next = next.map(|last| URL_SAFE_NO_PAD.encode(key(last).as_ref()));
    Ok((part, next))
}

fn decode(cursor: &str) -> Result<String, Invalid> {
    let bytes = URL_SAFE_NO_PAD.decode(cursor).ok();
    let text = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
    text.ok_or_else(|| Invalid::new("cursor", "invalid; use the cursor of the previous page"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_numbered_from_one() {
        let page = Page::of((0..45).collect(), 3, 20);
        assert_eq!(page.items, (40..45).collect::<Vec<_>>());
        assert_eq!((page.total, page.pages(), page.has_next()), (45, 3, false));
        assert!(Page::of((0..45).collect(), 2, 20).has_next());
        let beyond = Page::of((0..45).collect(), usize::MAX, 20);
        assert!(beyond.items.is_empty() && !beyond.has_next());
        assert_eq!(Page::of(Vec::<u8>::new(), 1, 20).pages(), 0);
    }

    fn part(list: &[&'static str], cursor: Option<&str>) -> (Vec<&'static str>, Option<String>) {
        after_cursor(list.to_vec(), cursor, 2, ListOrder::Ascending, |item| *item).unwrap()
    }

    #[test]
    fn a_cursor_continues_after_its_item() {
        let list = ["a", "b", "c", "d", "e"];
        let (first, next) = part(&list, None);
        assert_eq!(first, ["a", "b"]);
        let (second, next) = part(&["0", "a", "b", "c", "d", "e"], next.as_deref());
        assert_eq!(second, ["c", "d"]);
        let (rest, next) = part(&list, next.as_deref());
        assert_eq!((rest, next), (vec!["e"], None));
        let wrong = after_cursor(list.to_vec(), Some("?"), 2, ListOrder::Ascending, |item| {
            *item
        });
        assert!(wrong.is_err());
        assert_eq!(part(&["a"], Some("")), (vec!["a"], None));
    }

    #[test]
    fn deleted_items_do_not_end_a_list() {
        let (_, next) = part(&["a", "b", "c", "d"], None);
        assert_eq!(part(&["c", "d"], next.as_deref()), (vec!["c", "d"], None));
        let down = |list: &[&'static str], cursor: Option<&str>| {
            after_cursor(list.to_vec(), cursor, 2, ListOrder::Descending, |item| {
                *item
            })
            .unwrap()
        };
        let (first, next) = down(&["d", "c", "b", "a"], None);
        assert_eq!(first, ["d", "c"]);
        assert_eq!(down(&["b", "a"], next.as_deref()), (vec!["b", "a"], None));
        assert_eq!(down(&["d"], next.as_deref()), (vec![], None));
    }
}
