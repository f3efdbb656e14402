//! Characters that a terminal does not show, or that change the order of others.

/// Whether a terminal does not show this character or reorders its neighbours because of it.
///
/// These are control characters (C0, DEL and C1), text direction marks, line separators, white space
/// other than a space, and characters without a width. Programs do not print untrusted text with
/// them, and ids and names do not contain them.
pub fn is_invisible(character: char) -> bool {
    if character.is_ascii() {
        return character.is_ascii_control();
    }
    character.is_control()
        || character.is_whitespace()
        || INVISIBLE
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&character))
}

/// Unicode's `Bidi_Control` and `Default_Ignorable_Code_Point`, annotations, and the blank pattern of Braille.
const INVISIBLE: [(char, char); 17] = [
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
    fn invisible_characters_are_found_and_letters_of_every_script_are_not() {
        for invisible in [
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
            assert!(is_invisible(invisible), "{invisible:?}");
        }
        for visible in " aZ0-_.:@%é…中文עבריתعربيहिन्दी한글😀".chars()
        {
            assert!(!is_invisible(visible), "{visible:?}");
        }
        assert!(INVISIBLE.is_sorted());
    }
}
