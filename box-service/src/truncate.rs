//! Truncation of output: its head, a notice and its tail.

/// Default maximum output of a stream, in characters.
pub const DEFAULT_OUTPUT_LIMIT_CHARS: usize = 4000;

/// Share of the kept text that comes from the beginning, in percent.
const HEAD_PERCENT: usize = 60;

fn notice(removed: usize) -> String {
    format!("\n\n... [{removed} characters truncated] ...\n\n")
}

/// Cuts `text` to at most `limit` characters; `None` if it fits.
///
/// The result is 60 % head and 40 % tail around a notice with the number of removed characters. If the limit is too
/// small for the notice, only the head remains.
pub fn truncate(text: &str, limit: usize) -> Option<String> {
    // A text has at most as many characters as bytes, so a short text needs no counting.
    if text.len() <= limit {
        return None;
    }
    let total = text.chars().count();
    if total <= limit {
        return None;
    }
    let Some((kept, notice)) = fit(total, limit) else {
        return Some(text[..byte_of(text, limit)].to_owned());
    };
    let head = kept * HEAD_PERCENT / 100;
    let tail = kept - head;
    let mut cut = String::with_capacity(text.len().min(4 * limit));
    cut.push_str(&text[..byte_of(text, head)]);
    cut.push_str(&notice);
    cut.push_str(&text[byte_from_end(text, tail)..]);
    Some(cut)
}

/// Returns the number of kept characters and the notice with the right number.
/// Returns `None` if the notice alone is too long.
fn fit(total: usize, limit: usize) -> Option<(usize, String)> {
    // Each further digit of the number removes one more character of text, so the loop searches by digits. The number
    // never shrinks, so the first consistent one is the result.
    let mut text = notice(total.saturating_sub(limit));
    loop {
        let kept = limit.checked_sub(text.len())?;
        let next = notice(total - kept);
        if next.len() == text.len() {
            return Some((kept, next));
        }
        text = next;
    }
}

/// Returns the byte offset of the character number `index`.
fn byte_of(text: &str, index: usize) -> usize {
    text.char_indices()
        .nth(index)
        .map_or(text.len(), |(at, _)| at)
}

/// Returns the byte offset of the last `count` characters.
fn byte_from_end(text: &str, count: usize) -> usize {
    match count.checked_sub(1) {
        None => text.len(),
        Some(before) => text
            .char_indices()
            .rev()
            .nth(before)
            .map_or(0, |(at, _)| at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_within_the_limit_is_unchanged() {
        assert_eq!(truncate("hello world", 100), None);
        assert_eq!(truncate(&"a".repeat(200), 200), None);
        assert_eq!(truncate("", 0), None);
    }

    #[test]
    fn characters_are_counted_and_not_bytes() {
        assert_eq!(truncate(&"é".repeat(100), 100), None);
        let cut = truncate(&"é".repeat(101), 100).unwrap();
        assert_eq!(cut.chars().count(), 100);
    }

    #[test]
    fn sixty_percent_is_head() {
        let text = "h".repeat(10_000) + &"t".repeat(10_000);
        let cut = truncate(&text, 4000).unwrap();
        let notice = "\n\n... [16040 characters truncated] ...\n\n";
        assert_eq!(notice.len(), 40);
        let expected = "h".repeat(2376) + notice + &"t".repeat(1584);
        assert_eq!(cut, expected);
    }

    #[test]
    fn the_number_accounts_for_the_length_of_its_digits() {
        // Removing 99 characters needs two digits, which removes one more and makes it 100.
        for total in 130..240 {
            let text = "x".repeat(total);
            let cut = truncate(&text, 129).unwrap();
            let kept = cut.matches('x').count();
            let notice = format!("[{} characters truncated]", total - kept);
            // The notice itself has no x.
            assert!(cut.contains(&notice), "{total}: {cut}");
            assert_eq!(cut.len(), 129);
        }
    }

    #[test]
    fn a_limit_smaller_than_the_notice_leaves_the_head() {
        assert_eq!(truncate("abcdef", 3).as_deref(), Some("abc"));
        assert_eq!(truncate("abcdef", 0).as_deref(), Some(""));
    }

    fn removed_in(notice: &str) -> Option<usize> {
        notice
            .strip_prefix("\n\n... [")?
            .strip_suffix(" characters truncated] ...\n\n")?
            .parse()
            .ok()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn holds_for_any_text_and_limit(text in "(\\PC|\n|é|𝕏){0,400}", limit in 0_usize..450) {
            let all: Vec<char> = text.chars().collect();
            let Some(cut) = truncate(&text, limit) else {
                prop_assert!(all.len() <= limit);
                return Ok(());
            };
            prop_assert!(all.len() > limit, "cut although it fits");
            let cut: Vec<char> = cut.chars().collect();
            prop_assert!(cut.len() <= limit, "over the limit");
            let matched = (1..=3).find_map(|digits| {
                let kept = cut.len().checked_sub(35 + digits)?;
                let (head, tail) = (kept * 60 / 100, kept - kept * 60 / 100);
                let notice: String = cut[head..cut.len() - tail].iter().collect();
                let fits = cut[..head] == all[..head] && cut[cut.len() - tail..] == all[all.len() - tail..];
                (fits && removed_in(&notice)? == all.len() - kept).then_some(())
            });
            let found = matched.is_some() && cut.len() == limit;
            let head_only = limit < notice(all.len()).len() && cut == all[..limit];
            prop_assert!(found || head_only, "neither head, notice and tail nor head alone");
        }
    }
}
