//! Lists of boxes and items: filters, order and pages.

use box_protocol::{Invalid, Labels};
use serde_json::{Value, json};

use crate::http::body::Params;
use crate::http::page::{ListOrder, after_cursor};

/// The part of a list that a request asks for, with the members that old and new clients read.
pub(super) struct ListPage<T> {
    pub(super) items: Vec<T>,
    pub(super) next_cursor: Option<String>,
    /// The offset of the next part; 0 if this is the last.
    pub(super) next_offset: usize,
}

impl<T> ListPage<T> {
    /// Sorts a list by `key`, which no two items share, and cuts the requested part out of it.
    pub(super) fn of(
        mut items: Vec<T>,
        params: &Params,
        default_limit: usize,
        key: impl Fn(&T) -> String,
    ) -> Result<Self, Invalid> {
        let rule = "must be between 1 and 500";
        let mut limit = params.parsed::<usize>("page_size", rule)?;
        if limit.is_none() {
            limit = params.parsed::<usize>("limit", rule)?;
        }
        if limit.is_some_and(|limit| !(1..=500).contains(&limit)) {
            return Err(Invalid::new("limit", rule));
        }
        let limit = limit.unwrap_or(default_limit);
        let offset = params.parsed::<usize>("offset", "must be 0 or more")?;
        let offset = offset.unwrap_or_default();
        let order = order(params)?;
        items.sort_by_cached_key(&key);
        if order == ListOrder::Descending {
            items.reverse();
        }
        let total = items.len();
        let cursor = params.get("cursor");
        let rest: Vec<T> = items.into_iter().skip(offset).collect();
        let (items, next_cursor) = after_cursor(rest, cursor, limit, order, key)?;
        let end = offset.saturating_add(items.len());
        let is_last = cursor.is_some() || end >= total;
        Ok(Self {
            items,
            next_cursor,
            next_offset: if is_last { 0 } else { end },
        })
    }

    /// Returns the body; `old` is the older name of the items, and `shown` are the items.
    pub(super) fn body(&self, old: &str, shown: &[Value]) -> Value {
        json!({
            old: shown, "items": shown, "next_cursor": self.next_cursor, "offset": self.next_offset,
        })
    }
}

/// Returns the key of an item in a list that is sorted by `value`. Items with the same value are in order of their ids.
pub(super) fn sort_key(value: &str, id: &str) -> String {
    format!("{value}\0{id}")
}

/// Returns a number as text with the same order; none comes first.
pub(super) fn number_key(number: Option<u64>) -> String {
    number.map_or_else(String::new, |number| format!("{number:020}"))
}

/// Refuses filters that this server does not have: without them, the list would have more items.
pub(super) fn check_filters(params: &Params) -> Result<(), Invalid> {
    if params.all("tag_value_id").any(|value| !value.is_empty()) {
        let rule = "not supported by this server; omit it, or use labels";
        return Err(Invalid::new("tag_value_id", rule));
    }
    // A caller sees only what it has created.
    match params.get("created_by") {
        None | Some("me") => Ok(()),
        Some(_) => Err(Invalid::new("created_by", "must be me")),
    }
}

/// Returns the order of a list.
fn order(params: &Params) -> Result<ListOrder, Invalid> {
    match params.get("sort_order").or(params.get("sort_direction")) {
        None | Some("asc") => Ok(ListOrder::Ascending),
        Some("desc") => Ok(ListOrder::Descending),
        Some(_) => Err(Invalid::new("sort_order", "must be asc or desc")),
    }
}

/// Returns whether labels match all filters `label=KEY` and `label=KEY=VALUE`.
pub(super) fn has_labels(labels: &Labels, params: &Params) -> bool {
    params.all("label").all(|wanted| {
        let (key, value) = wanted.split_once('=').unzip();
        let found = labels.get(key.unwrap_or(wanted));
        found.is_some_and(|found| value.is_none_or(|value| found == value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(query: &str) -> Result<(Vec<&'static str>, Option<String>, usize), Invalid> {
        let params = Params::parse(query).unwrap();
        let items = vec!["c", "a", "b", "e", "d"];
        let page = ListPage::of(items, &params, 50, |item| (*item).to_owned())?;
        Ok((page.items, page.next_cursor, page.next_offset))
    }

    #[test]
    fn old_clients_page_by_offset_and_new_ones_by_cursor() {
        let (items, cursor, offset) = page("limit=2").unwrap();
        assert_eq!((items, offset), (vec!["a", "b"], 2));
        let (items, _, offset) = page("limit=2&offset=4").unwrap();
        assert_eq!((items, offset), (vec!["e"], 0));
        let (items, ..) = page(&format!("page_size=3&cursor={}", cursor.unwrap())).unwrap();
        assert_eq!(items, ["c", "d", "e"]);
        let (items, cursor, _) = page("page_size=2&sort_order=desc").unwrap();
        assert_eq!(items, ["e", "d"]);
        let next = format!("page_size=2&sort_order=desc&cursor={}", cursor.unwrap());
        assert_eq!(page(&next).unwrap().0, ["c", "b"]);
        for wrong in [
            "limit=0",
            "page_size=501",
            "limit=x",
            "offset=-1",
            "cursor=%3F",
        ] {
            assert!(page(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_filter_that_the_server_does_not_have_is_refused() {
        let check = |query| check_filters(&Params::parse(query).unwrap());
        assert_eq!(check("created_by=me&label=a&tag_value_id="), Ok(()));
        for (query, field) in [
            ("created_by=you", "created_by"),
            ("tag_value_id=&tag_value_id=1", "tag_value_id"),
        ] {
            assert_eq!(check(query).unwrap_err().field(), field);
        }
    }

    #[test]
    fn labels_are_compared_by_key_or_by_value() {
        let labels = Labels::from([("a".to_owned(), "1".to_owned())]);
        for (query, matches) in [
            ("", true),
            ("label=a", true),
            ("label=a%3D1", true),
            ("label=a%3D2", false),
            ("label=a&label=b", false),
        ] {
            assert_eq!(
                has_labels(&labels, &Params::parse(query).unwrap()),
                matches,
                "{query}"
            );
        }
    }
}
