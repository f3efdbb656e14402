//! The tool for code in interpreters that keep their state.

use box_protocol::actions::{Language, OutputMode, ShellCreateParams, ShellRunParams};
use box_protocol::{BoxError, RunError, ShellId};
use schemars::JsonSchema;
use serde::Deserialize;

use super::answer::{Answer, MAX_IMAGE_BYTES};
use super::commands::{answer, default_wait, run_in_shell, waiting};
use super::errors::{rename, reword};
use super::excerpt::MAX_BYTES;
use super::follow::{Progress, follow};
use super::session::Session;

/// Replaces an image for which the answer has no room.
const LEFT_OUT: &str = "[an image is left out: the images of an answer have at most 600 KiB; use a lower resolution, or show it alone]\n";

/// The end of a part of a traceback that the interpreter has cut.
const CUT: &str = " [truncated]";

/// Returns the length of bytes in base64.
fn base64_length(bytes: usize) -> usize {
    bytes.div_ceil(3) * 4
}

/// A language of code.
#[derive(Debug, Clone, Copy, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum CodeLanguage {
    #[default]
    Python,
    JavaScript,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RunCodeArgs {
    /// Code to run. Its last expression is printed; figures of matplotlib are returned as images.
    code: String,
    /// Language of the code; python if absent.
    #[serde(default)]
    language: CodeLanguage,
    /// Box to run it in; the default box if absent.
    r#box: Option<String>,
    /// Name of an interpreter of its own; one per language if absent.
    context: Option<String>,
    /// Seconds to wait for the end, at most 600. Code that runs longer continues in the background.
    #[serde(default = "default_wait")]
    wait_s: u64,
    /// Seconds after which the code is interrupted.
    timeout_s: Option<u64>,
}

pub(super) async fn run_code(
    session: Session,
    args: RunCodeArgs,
    progress: Progress,
) -> Result<Answer, BoxError> {
    let box_id = session.open(args.r#box.as_deref()).await?;
    let (language, default) = match args.language {
        CodeLanguage::Python => (Language::Python, "code-python"),
        CodeLanguage::JavaScript => (Language::JavaScript, "code-javascript"),
    };
    let in_context = |error: BoxError| {
        let error = rename(error, &[("shell_id", "context"), ("text", "code")]);
        let exists = "context: it has another language; choose another name";
        reword(error, "language", exists)
    };
    let shell_id = ShellId::new(args.context.as_deref().unwrap_or(default));
    let shell_id = shell_id.map_err(|error| in_context(error.into()))?;
    let create = ShellCreateParams {
        shell_id: Some(shell_id.clone()),
        language,
        output: OutputMode::Merged,
        ..ShellCreateParams::new(box_id.clone())
    };
    let created = session.target().create_shell(create).await;
    created.map_err(in_context)?;
    let params = ShellRunParams {
        timeout_ms: args.timeout_s.map(|limit| limit.saturating_mul(1000)),
        attach: Some(waiting(args.wait_s)),
        ..ShellRunParams::new(box_id.clone(), shell_id, args.code)
    };
    let mut followed = follow(run_in_shell(session.clone(), params), &progress)
        .await
        .map_err(in_context)?;
    session.notes().adjusted(&followed.adjusted);
    let mut images = Vec::new();
    let mut room = base64_length(MAX_IMAGE_BYTES);
    let mut values = String::new();
    for displayed in std::mem::take(&mut followed.displayed) {
        let mut data = displayed.data;
        let image = ["image/png", "image/jpeg"];
        let image = image.into_iter().find(|kind| data.contains_key(*kind));
        if let Some(kind) = image {
            let image = data.remove(kind).unwrap_or_default().replace('\n', "");
            match room.checked_sub(image.len()) {
                Some(rest) => {
                    room = rest;
                    images.push((kind, image));
                }
                None => values.push_str(LEFT_OUT),
            }
        } else if let Some(text) = data.remove("text/plain") {
            values.push_str(&text);
            values.push('\n');
        }
    }
    if let Some(error) = &followed.info.error {
        values.push_str(&missing(error, &followed.output.text()));
    }
    if values.len() > MAX_BYTES {
        values.truncate(values.floor_char_boundary(MAX_BYTES));
        values.push_str("\n[the values are cut; print parts of them]\n");
    }
    let mut answer = answer(box_id.as_str(), followed, values)?;
    for (kind, image) in images {
        answer.add_image(kind, image);
    }
    Ok(answer)
}

/// Returns an error as text, or nothing if the output has it.
fn missing(error: &RunError, output: &str) -> String {
    let is_there = |part: &String| output.contains(part.strip_suffix(CUT).unwrap_or(part));
    if !error.traceback.is_empty() && error.traceback.iter().all(is_there) {
        return String::new();
    }
    let mut text = String::new();
    for part in &error.traceback {
        text.push_str(part);
        // Parts of Python have line ends, those of JavaScript have none.
        if !part.ends_with('\n') {
            text.push('\n');
        }
    }
    if text.is_empty() || !text.contains(&error.value) {
        text.extend([error.name.as_str(), ": ", &error.value, "\n"]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_the_output_has_is_not_repeated() {
        let error = |parts: &[&str]| RunError {
            name: "E".to_owned(),
            value: "why".to_owned(),
            traceback: parts.iter().map(|part| (*part).to_owned()).collect(),
        };
        let python = error(&["Traceback:\n", "  File \"a\"\n    1/0\n", "E: why\n"]);
        let whole = python.traceback.concat();
        assert_eq!(missing(&python, &format!("mine\n{whole}")), "");
        assert_eq!(missing(&python, "mine\n"), whole);
        let cut = error(&["E: why and [truncated]"]);
        assert_eq!(missing(&cut, "E: why and more\n"), "");
        let javascript = error(&["E: why", "    at f"]);
        assert_eq!(missing(&javascript, ""), "E: why\n    at f\n");
        assert_eq!(missing(&error(&["F"]), ""), "F\nE: why\n");
        assert_eq!(missing(&error(&[]), ""), "E: why\n");
    }
}
