//! A program that can be the fork server of real boxes, as `boxd` is.

fn main() {
    box_sys::serve_if_asked(box_agent::run);
}
