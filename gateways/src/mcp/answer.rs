//! The result of a tool.

use box_protocol::BoxError;
use rmcp::model::{CallToolResult, ContentBlock};
use serde::Serialize;
use serde_json::Value;

use super::errors::rename;
use super::session::Session;

/// The maximum size of all images in an answer.
///
/// The official Python client refuses an event over 1 MiB. In base64 the images take 800 KiB of it.
pub(super) const MAX_IMAGE_BYTES: usize = 600 * 1024;

/// The result of a tool: content for the model, and the same as data.
///
/// Some clients give their model only the data, if there is any: Claude Code instead of the text, Codex instead of the
/// text and the images. Therefore the data has everything that a model must know, and an answer with an image has none.
#[derive(Debug)]
pub(super) struct Answer {
    text: String,
    images: Vec<ContentBlock>,
    data: Option<Value>,
}

impl Answer {
    /// Creates a result with a text.
    pub(super) fn new(text: impl Into<String>, data: &impl Serialize) -> Result<Self, BoxError> {
        let data = serde_json::to_value(data).map_err(|error| {
            // Only a value with keys that are no strings fails.
            BoxError::internal(format!("result: {error}"))
        })?;
        Ok(Self {
            data: Some(data),
            ..Self::text(text)
        })
    }

    /// Creates a result that every client shows as this text.
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            images: Vec::new(),
            data: None,
        }
    }

    /// Adds an image in base64.
    pub(super) fn add_image(&mut self, kind: &str, base64: impl Into<String>) {
        self.images.push(ContentBlock::image(base64, kind));
    }

    fn into_result(self, notes: Vec<String>) -> CallToolResult {
        let mut content = vec![ContentBlock::text(with_notes(self.text, &notes))];
        let has_images = !self.images.is_empty();
        content.extend(self.images);
        let mut result = CallToolResult::success(content);
        let mut data = self.data.filter(|_| !has_images);
        if let Some(Value::Object(members)) = &mut data
            && !notes.is_empty()
        {
            members.insert("notes".to_owned(), notes.into());
        }
        result.structured_content = data;
        result
    }
}

/// Returns the result of a call on the wire, with what the call noted.
pub(super) fn result_of(answered: Result<Answer, BoxError>, session: &Session) -> CallToolResult {
    let notes = session.notes().take();
    match answered {
        Ok(answer) => answer.into_result(notes),
        Err(error) => failed(error, &notes),
    }
}

/// Returns the result of a call that failed, which the model reads.
fn failed(error: BoxError, notes: &[String]) -> CallToolResult {
    let error = rename(error, &[("box_id", "box"), ("command_id", "command")]);
    let text = format!("{}: {}", error.code().as_str(), error.message());
    CallToolResult::error(vec![ContentBlock::text(with_notes(text, notes))])
}

/// Adds notes to a text, one per line.
fn with_notes(mut text: String, notes: &[String]) -> String {
    for note in notes {
        text.extend(["\n[", note, "]"]);
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_with_an_image_has_no_data_that_would_hide_it() {
        let mut answer = Answer::new("shown", &json!({"box": "b"})).unwrap();
        let plain = Answer::new("shown", &json!({"box": "b"})).unwrap();
        answer.add_image("image/png", "AAAA");
        assert_eq!(answer.into_result(Vec::new()).structured_content, None);
        let plain = plain.into_result(vec!["n".to_owned()]);
        let data = plain.structured_content.unwrap();
        assert_eq!(data, json!({"box": "b", "notes": ["n"]}));
        assert_eq!(plain.content[0].as_text().unwrap().text, "shown\n[n]");
    }

    #[test]
    fn an_error_names_the_argument_of_the_tool_and_has_the_notes() {
        let error = BoxError::validation("box_id: must not be `..`");
        let result = failed(error, &["the default box is new".to_owned()]);
        let text = &result.content[0].as_text().unwrap().text;
        let expected = "validation: box: must not be `..`\n[the default box is new]";
        assert_eq!(text, expected);
    }
}
