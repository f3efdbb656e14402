//! Characters that a reader does not see, or that move what a reader sees.

/// Whether a terminal shows nothing in the place of this character, or shows its neighbours in another place: control
/// characters (C0, DEL and C1), marks of direction, separators of lines, blanks other than the plain space, and characters
/// without a width. A text that another party chose is not printed with them, and no id or name holds one.
pub fn is_invisible(character: char) -> bool {
    character.is_control()
        || (character.is_whitespace() && character != ' ')
        || UNSEEN
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&character))
}

/// Unicode's `Bidi_Control` and `Default_Ignorable_Code_Point`, annotations, and the blank pattern of Braille.
const UNSEEN: [(char, char); 17] = [
    ('\u{ad}', '\u{ad}'),
    ('\u{34f}', '\u{34f}'),
    ('\u{61c}', '\u{61c}'),
    ('\u{115f}', '\u{1160}'),
    ('\u{17b4}', '\u{17b5}'),
    ('\u{180b}', '\u{180f}'),
    ('\u{200b}', '\u{200f}'),
    ('\u{2028}', '\u{202e}'),
    ('\u{2060}', '\u{206f}'),
    ('\u{2800}', '\u{2800}'),
    ('\u{3164}', '\u{3164}'),
    ('\u{fe00}', '\u{fe0f}'),
    ('\u{feff}', '\u{feff}'),
    ('\u{ffa0}', '\u{ffa0}'),
    ('\u{fff0}', '\u{fffb}'),
    ('\u{1d173}', '\u{1d17a}'),
    ('\u{e0000}', '\u{e0fff}'),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_seen_is_found_and_letters_of_every_script_are_not() {
        for unseen in [
            '\0',
            '\x1b',
            '\x7f',
            '\u{9b}',
            '\u{85}',
            '\u{a0}',
            '\u{200d}',
            '\u{200e}',
            '\u{202e}',
            '\u{2066}',
            '\u{2069}',
            '\u{61c}',
            '\u{feff}',
            '\u{3000}',
            '\u{e0041}',
            '\u{e0100}',
        ] {
            assert!(is_invisible(unseen), "{unseen:?}");
        }
        for seen in " aZ0-_.:@%é…中文עבריתعربيहिन्दी한글😀".chars() {
            assert!(!is_invisible(seen), "{seen:?}");
        }
        assert!(UNSEEN.is_sorted());
    }
}
